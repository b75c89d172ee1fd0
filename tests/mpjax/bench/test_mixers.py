from __future__ import annotations

import pytest

from mpjax.bench import measure, mixers
from mpjax.kernels.recurrent.shapes import RecurrentShape

SHAPES = (
    RecurrentShape("small.delta", "delta", 2, 4, 16, 8, (4, 2, 16)),
    RecurrentShape("small.scan", "scan", 2, 4, 16, 8, (4, 2, 16)),
)


def test_every_case_is_measured_and_checked(take, without_cudnn, monkeypatch):
    take(step=30.0)
    sweep = mixers.Sweep(SHAPES, (3,), (70,))
    rows = list(mixers.run(sweep))
    cases = [(row["shape"], row["rows"], row["tokens"]) for row in rows]
    assert cases == [(shape.name, *case) for shape in SHAPES for case in ((3, 1), (1, 70))]
    assert len(rows) == sweep.cases
    assert mixers.failures(rows) == []
    for row in rows[::2]:
        assert row["state_bytes"] == 3 * 4 * 16 * 8 * 4
        assert row["microseconds"] == pytest.approx(30.0 / measure.copies(row["state_bytes"]))
        assert row["times_floor"] == pytest.approx(1.0)
        assert "times_cudnn" not in row
    for row in rows[1::2]:
        assert row["times_cudnn"] == pytest.approx(measure.copies(2 * 2 * 70 * 2 * 16))
        assert "times_floor" not in row
    # Outputs of other tokens must not pass.
    read, other = mixers.read, mixers.random_tokens(SHAPES[0], 1, 70, 9)

    def misread(shape, state, tokens):
        return read(shape, state, other if tokens.rate.shape[1] == 70 else tokens)

    monkeypatch.setattr(mixers, "read", misread)
    [wrong] = mixers.run(mixers.Sweep(SHAPES[:1], (), (70,)))
    assert "small.delta, 1 rows of 70 tokens: the error is" in mixers.failures([wrong])[0]
