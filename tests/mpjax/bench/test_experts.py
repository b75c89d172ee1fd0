from __future__ import annotations

import pytest

from mpjax.bench import experts
from mpjax.kernels import Gate
from mpjax.kernels.experts.shapes import ExpertShape

GATE_UP = ExpertShape("small.gate_up", 2, 6, 64, 32, Gate())
DOWN = ExpertShape("small.down", 2, 6, 32, 48)


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
