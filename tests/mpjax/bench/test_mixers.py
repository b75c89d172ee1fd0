from __future__ import annotations

import functools

import jax
import pytest

from mpjax.bench import measure, mixers
from mpjax.kernels.recurrent.shapes import RecurrentShape, named

SHAPES = (
    RecurrentShape("small.delta", "delta", 2, 4, 16, 8, (4, 2, 16)),
    RecurrentShape("small.scan", "scan", 2, 4, 16, 8, (4, 2, 16)),
)


@pytest.fixture(autouse=True)
def without_cudnn(monkeypatch):
    """jax.nn's attention by XLA, which every machine has."""
    attend = jax.nn.dot_product_attention

    @functools.wraps(attend)
    def by_xla(*arguments, implementation, **masks):
        assert (implementation, masks) == ("cudnn", {"is_causal": True})
        with jax.numpy_dtype_promotion("standard"):
            return attend(*arguments, implementation="xla", **masks)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)


def test_shapes_by_name():
    assert [shape.state for shape in named(["nemotron-h-8b", "qwen3.6-27b"])] == [
        (128, 64, 128),
        (48, 128, 128),
    ]
    with pytest.raises(ValueError, match=r"unknown shape 'x': expected one of qwen3\.6-27b"):
        named(["x"])


def test_every_case_is_measured_and_checked(take, monkeypatch):
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


def test_rows_and_lengths_are_checked():
    with pytest.raises(ValueError, match=r"rows are \(0,\) and prompt_tokens \(\)"):
        mixers.Sweep(SHAPES, (0,), ())
    with pytest.raises(ValueError, match="2 or more tokens"):
        mixers.Sweep(SHAPES, (), (1,))
