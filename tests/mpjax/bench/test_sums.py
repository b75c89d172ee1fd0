from __future__ import annotations

import jax
import numpy as np
import pytest

from mpjax.bench import sums

MESH = jax.sharding.Mesh(jax.devices()[:1], ("model",))


@pytest.mark.parametrize(
    ("devices", "sizes", "message"),
    [
        (1, (8,), "devices is 1: a sum over devices needs two or more"),
        (4096, (8,), "devices is 4096, and JAX sees"),
        (2, (8, 0), "expected one or more positive numbers"),
        (2, (), "expected one or more positive numbers"),
    ],
)
def test_what_can_not_be_measured(devices, sizes, message):
    with pytest.raises(ValueError, match=message):
        sums.Sweep(devices, sizes)


def test_ways_are_known():
    message = "unknown way 'sum': expected psum or gather or exchange or scatter or peer"
    with pytest.raises(ValueError, match=message):
        sums.Sweep(2, (8,), ways=("psum", "sum"))


@pytest.mark.parametrize("way", [way for way in sums.WAYS if way != "peer"])  # a GPU's
def test_each_way_adds(way):
    x = np.arange(12, dtype=np.float32).reshape(3, 4)[:, :3]
    found = jax.vmap(lambda row: sums.WAYS[way](row, "i", MESH), axis_name="i")(x)
    np.testing.assert_array_equal(found, [[12, 15, 18]] * 3)


def test_a_row_for_each_dtype_and_size(monkeypatch):
    """On a mesh of one device, whose sums are the arrays themselves."""
    monkeypatch.setattr(sums, "read_devices", lambda devices: MESH)
    monkeypatch.setattr(sums, "CHAIN", 2)
    options = (("xla_cpu_enable_fast_math", False),)
    sweep = sums.Sweep(2, (1, 2), options=options)
    rows = list(sums.run(sweep))
    assert len(rows) == sweep.cases == 4
    assert [(row["dtype"], row["bytes"]) for row in rows[:2]] == [
        *(("bfloat16", 1024), ("bfloat16", 2048))
    ]
    for row in rows:
        difference = row["pair_microseconds"] - row["addition_microseconds"]
        assert row["sum_microseconds"] == pytest.approx(difference)
        assert len(sums.cells(row)) == len(sums.HEADERS)
        assert (row["way"], row["compiler_options"]) == ("psum", dict(options))
    assert sums.failures(rows) == []
    [row] = sums.run(sums.Sweep(2, (1,), ("float32",), ("gather",)))
    assert row["difference"] == 0.0


def test_sums_that_are_not_xlas_are_failures():
    row = {"way": "peer", "dtype": "float32", "bytes": 8192, "difference": 1e-6}
    assert sums.failures([row]) == []
    wrong = "peer of 8192 bytes in float32 differs from psum by "
    assert sums.failures([row | {"difference": 0.5}]) == [f"{wrong}5.0e-01"]
    assert sums.failures([row | {"difference": float("nan")}]) == [f"{wrong}nan"]
