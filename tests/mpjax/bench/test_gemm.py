from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest

from mpjax.bench import gemm, measure
from mpjax.kernels import QuantizedActivations, WeightFormat, matmul
from mpjax.kernels.gemm.shapes import SMALL

EVEN = SMALL[0]


def test_every_case_is_measured_and_checked(take):
    take(matmul_test__2=30.0, matmul_test=12.0)
    sweep = gemm.Sweep((EVEN,), (1, 70), ("uint4:g128", "uint8:g128"))
    rows = list(gemm.run(sweep))
    assert len(rows) == sweep.cases == 4
    assert [(row["format"], row["M"]) for row in rows] == [
        *(("uint4:g128", 1), ("uint4:g128", 70)),
        *(("uint8:g128", 1), ("uint8:g128", 70)),
    ]
    assert gemm.failures(rows) == []
    for row in rows:
        format = WeightFormat.parse(row["format"])
        weight = gemm.random_weight(jax.random.key(0), EVEN, format)
        nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weight))
        assert (row["shape"], row["K"], row["N"]) == ("small.even", 512, 128)
        assert row["packed_bytes"] == nbytes
        count = row["copies"]
        assert count == max(2, math.ceil(1e5 / nbytes))
        assert row["microseconds"] == pytest.approx(42.0 / count)
        assert row["floor_microseconds"] == pytest.approx(42.0 / count)
        dense = 2 * 512 * 128
        assert row["cublas_microseconds"] == pytest.approx(42.0 / measure.copies(dense))
        assert row["kernel_microseconds"] == pytest.approx({"matmul_test": 42.0 / count})
        assert row == gemm.figures(row)


def test_the_last_row_is_checked():
    """A product that is wrong in its last row alone must not pass."""
    x = jnp.ones((1000, EVEN.channels), jnp.bfloat16)
    weight = gemm.random_weight(jax.random.key(0), EVEN, WeightFormat.parse("uint8:g128"))
    right = matmul(x, weight)
    assert gemm._error(right, x, weight) < measure.GATE
    assert gemm._error(right.at[-1].set(-right[-1]), x, weight) > measure.GATE


def test_the_choice_names_what_runs():
    weight = gemm.random_weight(jax.random.key(0), EVEN, WeightFormat.parse("uint4:g128"))
    few = gemm.choice(1, weight, None)
    assert few["implementation"] == "triton"
    assert few["configuration"]["tile_m"] == 8
    forced = gemm.choice(1, weight, "dequantize")
    assert forced == {"implementation": "dequantize", "configuration": None}


def test_what_other_kernels_of_a_model_do_is_not_measured(take, monkeypatch):
    take(kernel=1.0)
    seen = []

    def spy(x, weight, implementation=None):
        seen.append(type(x))
        terms = matmul(x, weight, implementation="reference", out_dtype=jnp.float32)
        return jnp.stack([0.25 * terms, 0.75 * terms])

    monkeypatch.setattr(gemm, "matmul_terms", spy)
    formats = ("uint4:g128", "int8/int8")
    rows = list(gemm.run(gemm.Sweep((EVEN,), (3,), formats, in_model=True)))
    assert [row["in_model"] for row in rows] == [True, True]
    assert gemm.failures(rows) == []
    assert QuantizedActivations in seen
    assert seen[0] is not QuantizedActivations
