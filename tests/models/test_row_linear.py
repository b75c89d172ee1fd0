from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from mpjax.kernels import (
    ActivationBlocks,
    ActivationFormat,
    DividedRows,
    PlainCodes,
    WeightFormat,
    pack,
    quantize,
    quantize_rows,
)
from mpjax.models import Linear
from mpjax.models.row_linear import RowLinear
from tests.sweeps import in_sweep


def on_one_device(
    linear: RowLinear, x: jax.Array, function: Any = lambda linear, x: linear.terms(x)[0]
) -> jax.Array:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",))
    whole = PartitionSpec()
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(whole, whole),
        out_specs=whole,
        check_vma=False,
    )(linear, x)


def random(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("text", [None, "uint4:g32"])
def test_one_device_has_the_product_of_a_linear(text):
    kernel, bias, x = random(64, 8), random(8), random(2, 3, 64)
    packed = kernel if text is None else quantize(kernel, text)
    found = on_one_device(RowLinear(packed, bias, "model", None), x)
    np.testing.assert_allclose(found, Linear(packed, bias)(x), rtol=1e-4, atol=1e-4)


def test_x_is_gathered_for_a_permutation():
    rng = np.random.default_rng(1)
    order = jnp.asarray(rng.permutation(64), jnp.int32)
    codes = jnp.asarray(rng.integers(0, 16, (64, 8)), jnp.uint8)
    scales = jnp.asarray(rng.uniform(0.1, 1, (2, 8)), jnp.float16)
    kernel = pack(PlainCodes(WeightFormat("uint4", 32, True), codes, scales, permutation=order))
    x = random(2, 64)
    found = on_one_device(RowLinear(kernel, None, "model", kernel.format), x)
    np.testing.assert_allclose(found, Linear(kernel)(x), rtol=1e-4, atol=1e-4)
    assert RowLinear(kernel, None, "model", kernel.format).activations == ActivationFormat()
    straight = dataclasses.replace(kernel, permutation=None)
    assert not np.allclose(found, Linear(straight)(x), atol=1e-2)


@pytest.mark.parametrize("text", ["int8:gK/int8", in_sweep("liquid4:g64/int8"), "float8:gK/float8"])
def test_parts_of_rows_are_rounded_as_whole_rows(text):
    kernel, x = quantize(random(64, 8), text), random(2, 64)
    linear = RowLinear(kernel, None, "model", kernel.format)
    assert linear.activations == DividedRows(ActivationFormat.of(kernel.format), "model")
    np.testing.assert_array_equal(on_one_device(linear, x), Linear(kernel)(x))
    rounded = quantize_rows(x, text)
    np.testing.assert_array_equal(on_one_device(linear, rounded), Linear(kernel)(x))


@pytest.mark.sweep
def test_rounding_counts_as_the_identity_in_derivatives():
    kernel, x = quantize(random(64, 8), "int8:gK/int8"), random(2, 64)
    linear = RowLinear(kernel, None, "model", kernel.format)
    gradient = jax.grad(lambda x: on_one_device(linear, x)[1].sum())(x)
    expected = jax.grad(lambda x: Linear(kernel)(x)[1].sum())(x)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)


def test_experts_read_the_channels_of_all_devices_in_their_order():
    rng = np.random.default_rng(1)
    orders = jnp.asarray([rng.permutation(64) for _ in range(3)], jnp.int32)
    stack = quantize(random(3, 64, 8), "uint4:g32")
    kernel = dataclasses.replace(stack, permutation=orders)
    experts, x = jnp.asarray([[2, 0]], jnp.int32), random(1, 2, 64)

    def routed(linear, x):
        found, straight = linear.routed(x, experts)
        assert straight.permutation is None
        return found

    found = on_one_device(RowLinear(kernel, None, "model", kernel.format), x, routed)
    for place, expert in enumerate((2, 0)):
        np.testing.assert_array_equal(found[0, place], x[0, place][orders[expert]])
    plain = RowLinear(stack, None, "model", stack.format)
    assert plain.routed(x, experts) == (x, stack)
    assert Linear(kernel).routed(x, experts) == (x, kernel)


def test_a_long_sum_has_the_dtype_of_x():
    kernel = jnp.ones((4, 1024), jnp.bfloat16)
    linear = RowLinear(kernel, jnp.ones(1024, jnp.bfloat16), "model", None)
    for rows, dtype in ((2, jnp.float32), (128, jnp.bfloat16)):
        assert on_one_device(linear, jnp.ones((rows, 4), jnp.bfloat16)).dtype == dtype


def test_the_format_is_that_of_the_whole_kernel():
    whole, kernel = WeightFormat("uint4", 64), quantize(random(64, 8), "uint4:g32")
    assert RowLinear(kernel, None, "model", whole).format == whole
    assert Linear(kernel).format == kernel.format
    assert Linear(random(64, 8)).format is None


def test_blocks_in_another_order_are_rounded_when_x_is_gathered():
    order = jnp.asarray(np.random.default_rng(1).permutation(256), jnp.int32)
    kernel = dataclasses.replace(
        quantize(random(256, 8), "int4:g128"),
        permutation=order,
        activation_bits=jnp.asarray([4, 8], jnp.uint8),
    )
    linear, x = RowLinear(kernel, None, "model", kernel.format), random(2, 256)
    assert linear.activations == ActivationFormat()
    np.testing.assert_allclose(on_one_device(linear, x), Linear(kernel)(x), rtol=1e-4, atol=1e-4)
    straight = RowLinear(dataclasses.replace(kernel, permutation=None), None, "model", None)
    assert isinstance(straight.activations, ActivationBlocks)
