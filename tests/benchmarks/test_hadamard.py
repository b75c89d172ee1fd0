from __future__ import annotations

import jax
import pytest

from benchmarks import hadamard
from mpjax.bench import measure

pytestmark = pytest.mark.any_version


def test_every_case_is_measured(monkeypatch):
    """The function that is timed runs, and its result has the width of a row."""
    shapes = []

    def run(function, *arguments):
        shapes.append(jax.tree.leaves(jax.eval_shape(function, *arguments))[0].shape)
        return float(len(shapes))

    monkeypatch.setattr(measure, "microseconds", run)
    rows = list(hadamard.run([256], [2, 65], [128]))
    assert [(row["rows"], row["format"]) for row in rows[:3]] == [
        (2, name) for name in hadamard.FORMATS
    ]
    assert [row["microseconds"] for row in rows[:2]] == [
        {"none": 1.0, "128": 2.0},
        {"none": 3.0, "128": 4.0},
    ]
    assert shapes == [(2, 256)] * 6 + [(65, 256)] * 6


def test_terms_are_those_of_products():
    few, many = hadamard.operand(1, 32), hadamard.operand(65, 32)
    assert (few.shape, few.dtype) == ((2, 1, 64), "float32")
    assert (many.shape, many.dtype) == ((1, 65, 64), "bfloat16")


def test_a_gpu_is_needed(capsys):
    if jax.default_backend() != "cpu":
        pytest.skip("there is a GPU")
    with pytest.raises(Exception, match="a benchmark measures a CUDA GPU"):
        hadamard.main(["--rows", "1"])
