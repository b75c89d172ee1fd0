from __future__ import annotations

import jax
import pytest

from benchmarks import norms
from mpjax.bench import measure
from mpjax.kernels.rowwise import block_norm

pytestmark = pytest.mark.any_version


def test_every_way_is_measured(monkeypatch):
    """The function that is timed runs, with the blocks of a program that its name says."""
    counts = []

    def run(function, *arguments):
        rows = jax.tree.leaves(jax.eval_shape(function, *arguments))[1].shape
        counts.append(block_norm.blocks_per_program(rows[0], 4))
        return float(len(counts))

    monkeypatch.setattr(measure, "microseconds", run)
    rows = list(norms.run([512], [1, 100], [2]))
    assert [row["chosen"] for row in rows] == ["1", "two kernels"]
    assert rows[0]["microseconds"] == {"16 bits": 1, "int8": 2, "two kernels": 3, "1": 4, "2": 5}
    assert counts[2:5] == counts[7:] == [None, 1, 2]


def test_a_gpu_is_needed(capsys):
    if jax.default_backend() != "cpu":
        pytest.skip("there is a GPU")
    with pytest.raises(Exception, match="a benchmark measures a CUDA GPU"):
        norms.main(["--rows", "1"])
