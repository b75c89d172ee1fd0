from __future__ import annotations

import math

import numpy as np
import pytest

from mpjax.bench import experts
from mpjax.kernels import Gate
from mpjax.kernels.experts.shapes import ExpertMLPShape, ExpertShape
from tests.mpjax.bench.rows import experts_row as row

GATE_UP = ExpertShape("small.gate_up", 2, 6, 64, 32, Gate())
DOWN = ExpertShape("small.down", 2, 6, 32, 48)


def test_figures_follow_from_times():
    found = experts.figures(row())
    assert found["teraflops"] == pytest.approx(10.0)  # 2 · 50 · 1000 · 2000 in 20 µs
    assert found["gigabytes_per_second"] == pytest.approx(200.0)
    assert (found["times_floor"], found["cublas_rate"]) == (2.0, 0.75)
    cells = dict(zip(experts.HEADERS, experts.cells(row()), strict=True))
    assert (cells["tokens"], cells["hit"], cells["ragged_dot µs"]) == ("10", "4", "")
    assert experts.cells(row(ragged_dot_microseconds=150.0))[9] == "150.0"


def test_errors_from_the_gate_on_fail():
    rows = [row(relative_error=error) for error in (7e-3, 8e-3, math.nan)]
    assert len(experts.failures(rows)) == 2
    assert experts.failures(rows)[0].startswith("small.down, uint4:g128, 10 tokens: the error is")


def test_experts_of_a_token_differ():
    chosen = experts.random_experts(GATE_UP, 50, 0)
    assert chosen.shape == (50, 2)
    assert (chosen[:, 0] != chosen[:, 1]).all()
    assert len(np.unique(chosen)) == 6


def test_every_case_is_measured_and_checked(take):
    take(experts_test=30.0)
    sweep = experts.Sweep((GATE_UP, DOWN), (1, 9), ("uint4:g32",))
    rows = list(experts.run(sweep))
    assert [(each["shape"], each["M"]) for each in rows] == [
        *(("small.gate_up", 1), ("small.gate_up", 9)),
        *(("small.down", 1), ("small.down", 9)),
    ]
    assert len(rows) == sweep.cases
    assert experts.failures(rows) == []
    assert rows[0]["hit"] == 2
    assert rows[0]["hit_bytes"] == pytest.approx(rows[0]["packed_bytes"] / 3)
    for each in rows:
        assert each["microseconds"] == pytest.approx(30.0 / each["copies"])
        assert each["ragged_dot_microseconds"] == pytest.approx(30.0)
        assert each == experts.figures(each)


def test_both_products_of_an_expert_at_once(take):
    take(experts_test=30.0)
    mlp = ExpertMLPShape("small.mlp", GATE_UP, ExpertShape("small.down", 2, 6, 16, 64))
    [each] = experts.run(experts.Sweep((mlp,), (9,), ("uint8:gK",)))
    assert experts.failures([each]) == []
    assert (each["K"], each["N"]) == (64, 48)
    assert each["ragged_dot_microseconds"] is None


@pytest.mark.parametrize(("tokens", "formats"), [((0,), ("uint4",)), ((1,), ("uint5",))])
def test_what_can_not_be_measured(tokens, formats):
    with pytest.raises(ValueError, match=r"positive|uint5"):
        experts.Sweep((DOWN,), tokens, formats)
