"""One device has all channels here; tests/pallas_kernels/sharded_products.py has several."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from mpjax.kernels import (
    ActivationFormat,
    DividedRows,
    QuantizedActivations,
    gated,
    grouped_matmul_terms,
    matmul,
    quantize,
    quantize_rows,
)
from mpjax.kernels.device import UnsupportedError
from tests.pallas_kernels.oracles import random_array

INT8 = DividedRows(ActivationFormat("int8"), "model")


def on_one_device(function, *arguments):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",))
    whole = PartitionSpec()
    return jax.shard_map(
        function, mesh=mesh, in_specs=(whole,) * len(arguments), out_specs=whole, check_vma=False
    )(*arguments)


@pytest.mark.parametrize("values", ["int8", "float8"])
def test_one_device_rounds_its_rows(values, rng):
    format, x = ActivationFormat(values), random_array(rng, (2, 3, 64), "bfloat16")
    rows = DividedRows(format, "model")
    assert (rows.values, rows.scales_rows) == (values, True)
    found = on_one_device(lambda x: quantize_rows(x, rows), x)
    assert isinstance(found, QuantizedActivations)
    jax.tree.map(np.testing.assert_array_equal, found, quantize_rows(x, format))


def test_the_largest_peak_of_all_devices():
    """`vmap` over a named axis has the collectives of devices, here of three."""
    peaks = np.float32([[1, 0, 5, np.nan, 2], [3, 0, 4, 9, np.inf], [2, 1e-30, 4.5, 1, np.nan]])
    found = jax.vmap(INT8.largest, axis_name="model")(jnp.asarray(peaks))
    np.testing.assert_array_equal(found, np.tile(peaks.max(0), (3, 1)))


def test_products_and_gates_round_their_inputs(rng):
    x, weight = random_array(rng, (3, 64), "float32"), random_array(rng, (64, 8), "float32")
    packed = quantize(weight, "int8:gK/int8")
    found = on_one_device(lambda x: matmul(x, packed, activations=INT8), x)
    np.testing.assert_array_equal(found, matmul(x, packed))
    found = on_one_device(lambda x: gated(x, "silu", dtype=x.dtype, format=INT8), x[None])
    expected = gated(x[None], "silu", dtype=x.dtype, format="int8")
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_experts_take_no_other_rounding(rng):
    x, weight = random_array(rng, (2, 64), "float32"), random_array(rng, (3, 64, 8), "float32")
    experts, weights = jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1))
    with pytest.raises(ValueError, match="activations is 'int8': expected a DividedRows"):
        grouped_matmul_terms(x, weight, experts, weights, activations="int8")  # type: ignore[arg-type]
    for stack, of in (
        (weight, "plain to 16-bit"),
        (quantize(weight, "float8:gK/float8"), "float8"),
    ):
        with pytest.raises(ValueError, match=f"rounded to int8, and beside a weight in {of}"):
            grouped_matmul_terms(x, stack, experts, weights, activations=INT8)


def test_no_kernel_rounds_before_all_magnitudes_are_there(rng):
    with pytest.raises(UnsupportedError, match="largest magnitudes come before the rounding"):
        quantize_rows(random_array(rng, (2, 64), "bfloat16"), INT8, implementation="triton")


@pytest.mark.parametrize("text", ["16-bit", "int8:g128", "float8:g128"])
def test_other_formats_are_refused(text):
    with pytest.raises(ValueError, match=f"divided rows is '{text}': expected one that has a"):
        DividedRows(ActivationFormat.parse(text), "model")
