from __future__ import annotations

import json
import math
import os
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import profiler

from mpjax.bench import measure
from tests.mpjax.bench.rows import gemm_row


@pytest.fixture
def profile(monkeypatch):
    """Makes CUPTI report calls, each a list of (kernel, milliseconds)."""

    def install(calls):
        def fake(function, aggregate, iterations):
            assert not aggregate
            if calls is not None:
                assert iterations == len(calls)
            result = calls[0] if calls is not None and iterations == 1 else calls
            return lambda *arguments: (function(*arguments), result)

        monkeypatch.setattr(profiler, "measure", fake)

    return install


def test_kernels_are_summed_by_name_and_the_median_call_counts(profile):
    profile(
        [
            [("a", 0.001), ("b", 0.005), ("a", 0.002)],
            [("a", 0.010), ("b", 0.004), ("a", 0.090)],
            [("a", 0.002), ("b", 0.006), ("a", 0.002)],
        ]
    )
    seen = []
    function = measure.Unjitted(lambda x: seen.append(x))
    found = measure.kernel_microseconds(function, 7, iterations=3)
    assert found == pytest.approx({"a": 4.0, "b": 5.0})
    assert seen == [7]
    assert measure.microseconds(lambda x: x, 7, iterations=3) == pytest.approx(9.0)


def test_the_profiler_takes_an_unjitted_function_for_a_jitted_one():
    calls = []
    function = measure.Unjitted(lambda x, *, y: calls.append(x) or x + y)
    assert isinstance(function, jax.stages.Wrapped)  # what it would put under `jit` otherwise
    assert [function(1, y=2), function(1, y=2), calls] == [3, 3, [1, 1]]
    with pytest.raises(TypeError, match="only be called"):
        function.lower(1)


def test_numbers_that_xla_appends_are_dropped():
    names = {"matmul_uint4": 2.0, "matmul_uint4__2": 4.0, "fusion_12_1": 9.0, "gemm_64x5_TNN": 1.0}
    found = measure.merge_names(names, calls=2)
    assert list(found.items()) == [("fusion", 4.5), ("matmul_uint4", 3.0), ("gemm_64x5_TNN", 0.5)]


def test_flat_bytes_are_all_bytes_in_order():
    leaves: dict[str, np.ndarray] = {
        "a": np.array([1, 65535, 3], np.uint16),
        "b": np.array([[2**32 - 1], [5]], np.uint32),
        "c": np.array([1.5, -2.0, 0.25], ml_dtypes.float8_e4m3fn),
        "d": np.array([-1.5], ml_dtypes.bfloat16),
    }
    found = np.asarray(measure.flat_bytes(jax.tree.map(jnp.asarray, leaves)))
    expected = b"".join(leaf.tobytes() for leaf in leaves.values())
    assert found.dtype == np.uint32
    assert found.tobytes() == expected + bytes(-len(expected) % 4)


def test_the_floor_is_the_time_of_one_tree(take):
    take(reduce=30.0)
    trees = [{"words": jnp.ones((4, i + 1), jnp.uint16)} for i in range(3)]
    assert measure.floor_microseconds(trees) == pytest.approx(10.0)


def test_results_before_stay_where_saving_is_interrupted(tmp_path, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "stamp", dict)
    path = measure.save("name", {"x": 1}, tmp_path)
    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure.save("name", {"x": 2}, tmp_path)
    assert json.loads(path.read_text()) == {"x": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_the_stamp_says_where_and_with_what(monkeypatch):
    measure.stamp.cache_clear()
    monkeypatch.setenv("GIT_COMMIT", "named")
    monkeypatch.setattr(
        "sys.argv", ["/bin/mpjax", "bench", "gemm", "--output", "/a/b", "--rows", "1"]
    )
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    found = measure.stamp()
    assert list(found) == ["device", "commit", "driver", "versions", "command"]
    assert found["commit"] == "named"
    assert found["versions"]["jax"] == jax.__version__
    assert found["command"] == "mpjax bench gemm --rows 1"
    measure.stamp.cache_clear()
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name="benchmarks.x"))
    assert measure.stamp()["command"] == "python -m benchmarks.x bench gemm --rows 1"
    measure.stamp.cache_clear()


def test_errors_from_the_gate_on_fail_where_they_were_measured():
    rows = [gemm_row(relative_error=error) for error in (7.9e-3, None, 8e-3, math.nan)]
    wrong = measure.failures(rows, "{shape}, M = {M}")
    assert wrong[0] == "model.map, M = 1: the error is 8.0e-03, and the gate is 8e-03"
    assert len(wrong) == 2
