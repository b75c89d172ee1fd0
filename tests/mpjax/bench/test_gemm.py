from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.bench import gemm, measure
from mpjax.kernels import QuantizedActivations, QuantizedTensor, WeightFormat, matmul
from mpjax.kernels.gemm.shapes import SMALL, GemmShape
from tests.mpjax.bench.rows import gemm_row

EVEN = SMALL[0]


def test_figures_follow_from_times():
    row = gemm.figures(gemm_row(M=10, packed_bytes=9_910_000))
    assert row["teraflops"] == pytest.approx(20.0)  # 2 · 10 · 4000 · 5000 in 20 µs
    assert row["cublas_teraflops"] == pytest.approx(20 / 3)
    assert row["times_floor"] == pytest.approx(2.0)
    assert row["speedup"] == pytest.approx(3.0)
    # 9.91 MB of weight, 80 kB of x and 100 kB of product
    assert row["gigabytes_per_second"] == pytest.approx(504.5)
    assert gemm.figures(row) == row


def test_cells_are_in_the_order_of_the_headers():
    row = gemm_row(packed_bytes=10_000_000, implementation="triton")
    assert dict(zip(gemm.HEADERS, gemm.cells(row), strict=True)) == {
        "format": "uint4:g128",
        "M": "1",
        "µs": "20.0",
        "GB/s": "501",
        "TFLOP/s": "2.0",
        "× floor": "2.00",
        "cuBLAS µs": "60.0",
        "speed-up": "3.00",
        "error": "1.0e-03",
        "as": "triton",
    }


def test_a_row_without_the_size_of_its_weight_has_no_bandwidth():
    assert "gigabytes_per_second" not in gemm.figures(gemm_row())
    assert gemm.cells(gemm_row())[3] == ""


def test_errors_from_the_gate_on_fail():
    rows = [gemm_row(relative_error=error) for error in (7.9e-3, 8e-3, math.nan)]
    wrong = gemm.failures(rows)
    assert len(wrong) == 2
    assert wrong[0] == "model.map, uint4:g128, M = 1: the error is 8.0e-03, and the gate is 8e-03"


@pytest.mark.parametrize(
    ("rows", "formats", "message"),
    [
        ((1,), ("uint5",), "uint5"),
        ((1,), ("bfloat16",), "bfloat16 is not packed"),
        ((0, 4), ("uint4",), "positive"),
        ((), ("uint4",), "positive"),
    ],
)
def test_what_can_not_be_measured(rows, formats, message):
    with pytest.raises(ValueError, match=message):
        gemm.Sweep((EVEN,), rows, formats)


def test_few_large_products_at_a_time():
    wide = GemmShape("wide", 8192, 57344)
    assert gemm.copies(wide, 1, 8_000_000) == 25
    assert gemm.copies(wide, 2048, 8_000_000) == 8  # 235 MB each
    assert gemm.copies(wide, 65536, 8_000_000) == 2


def test_random_weights_are_normal_numbers_in_the_format():
    key = jax.random.key(0)
    dense = np.asarray(gemm.random_weight(key, EVEN).astype(jnp.float32))
    assert dense.std() == pytest.approx(EVEN.channels**-0.5, rel=0.02)
    packed = gemm.random_weight(key, EVEN, WeightFormat.parse("uint8:g128"))
    assert isinstance(packed, QuantizedTensor)
    assert np.abs(np.asarray(packed.dequantize()) - dense).max() < 0.01 * np.abs(dense).max()


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
    assert gemm._error(right, x, weight) < gemm.GATE
    assert gemm._error(right.at[-1].set(-right[-1]), x, weight) > gemm.GATE


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


def test_rounding_alone_can_be_left_out(take, monkeypatch):
    take(kernel=1.0)
    seen = []

    def spy(x, weight, implementation=None):
        seen.append(type(x))
        return matmul(x, weight, implementation="reference")

    monkeypatch.setattr(gemm, "matmul", spy)
    sweep = gemm.Sweep((EVEN,), (3,), ("uint4:g128", "int8/int8"), rounded=True)
    rows = list(gemm.run(sweep))
    assert [row["rounded"] for row in rows] == [True, True]
    assert gemm.failures(rows) == []
    assert QuantizedActivations in seen
    assert seen[0] is not QuantizedActivations


def test_an_implementation_can_be_forced(take, monkeypatch):
    take(kernel=1.0)
    seen = []

    def spy(x, weight, implementation=None):
        seen.append(implementation)
        return matmul(x, weight, implementation="reference")

    monkeypatch.setattr(gemm, "matmul", spy)
    [row] = gemm.run(gemm.Sweep((EVEN,), (1,), ("uint4:g128",), "dequantize"))
    assert row["implementation"] == "dequantize"
    assert "dequantize" in seen
