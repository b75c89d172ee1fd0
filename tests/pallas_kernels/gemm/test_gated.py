from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import device, gated, matmul_gated, matmul_terms, quantize
from mpjax.kernels.gemm import plans
from mpjax.kernels.gemm.gated import config_of, product
from mpjax.kernels.gemm.plans import Plan, TritonConfig
from mpjax.kernels.rowwise.reference import ACTIVATIONS
from tests.pallas_kernels.gemm.weights import (
    dense,
    exact,
    random_activations,
    random_weight,
    weight_struct,
)
from tests.pallas_kernels.oracles import GATES, relative_error
from tests.sweeps import in_sweep


def expected(x, weight, activation):
    gate, up = np.split(exact(x) @ dense(weight), 2, axis=1)
    argument = np.asarray(ACTIVATIONS[activation](gate), np.float64)
    return gate / (1 + np.exp(-argument)) * up


@pytest.mark.parametrize(
    ("text", "rows", "channels", "outputs", "config", "activation"),
    [
        ("uint4:g128", 1, 512, 128, TritonConfig(8, 64, 1, 4, 3), "silu"),
        # Half a block of K, and tiles that stick out of both halves and of the rows.
        ("uint4:g64:sym", 19, 320, 80, TritonConfig(16, 32, 1, 2, 3, "weight"), "gelu"),
        in_sweep("table4:g64", 3, 512, 192, TritonConfig(8, 128, 1, 4, 3), "silu"),
        in_sweep("float8:gK", 8, 256, 64, TritonConfig(8, 64, 1, 2, 4), "gelu"),
    ],
)
def test_against_float64(text, rows, channels, outputs, config, activation, rng):
    weight = random_weight(rng, text, channels, outputs)
    x = random_activations(rng, weight, rows, "bfloat16")
    found = product(x, weight, activation, config, interpret=True)
    assert (found.shape, found.dtype) == ((rows, outputs // 2), x.dtype)
    wide = found.astype(jnp.float32)
    assert relative_error(wide, expected(x, weight, activation)) < GATES["bfloat16"]


def test_elsewhere_it_is_two_operations(rng):
    weight = random_weight(rng, "uint4:g64", 128, 64)
    x = random_activations(rng, weight, 6, "bfloat16").reshape(2, 3, 128)
    np.testing.assert_array_equal(
        matmul_gated(x, weight, "gelu"), gated(matmul_terms(x, weight), "gelu", dtype=x.dtype)
    )


@pytest.mark.parametrize(
    ("rows", "splits", "is_joint"), [(1, 1, True), (3, 2, True), (16, 1, True), (16, 2, False)]
)
def test_only_whole_sums_pass_the_gate(rows, splits, is_joint):
    """With a few rows a plan that splits gives way to the rule's, if that does not."""
    weight = weight_struct("uint4:g128", 4096, 24576)
    x = jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16)
    planned = Plan("triton", TritonConfig(16, 64, splits, 4, 3))
    with device.described_as("another GPU"), plans.forced(planned):
        config = _config_of(x, weight)
    assert (config is not None) == is_joint
    if config is not None:
        assert config.splits == 1


def _config_of(x, weight):
    found = []
    jax.eval_shape(lambda x, weight: found.append(config_of(x, weight)), x, weight)
    return found[0]


@pytest.mark.parametrize(
    ("text", "shape", "dtype"),
    [
        ("int8/int8", (1, 4096), "bfloat16"),  # x is rounded first
        ("uint4:g128", (33, 4096), "bfloat16"),
        ("uint4:g128", (0, 4096), "bfloat16"),
        ("uint4:g128", (1, 4096), "float32"),
    ],
)
def test_other_products_have_no_joint_kernel(text, shape, dtype):
    weight, x = weight_struct(text, 4096, 24576), jax.ShapeDtypeStruct(shape, dtype)
    with device.described_as("another GPU"):
        assert _config_of(x, weight) is None


def test_is_one_kernel(lower_for_cuda):
    weight = weight_struct("uint4:g128", 4096, 24576)
    x = jax.ShapeDtypeStruct((2, 1, 4096), jnp.bfloat16)
    with device.described_as("another GPU"):
        text = lower_for_cuda(matmul_gated, x, weight)
    assert text.count("stablehlo.custom_call") == 1
    assert "matmul_gated_uint4" in text


def test_derivatives_are_those_of_two_operations(rng, monkeypatch):
    weight = random_weight(rng, "uint4:g64", 128, 64)
    x = random_activations(rng, weight, 2, "bfloat16")
    apart = jax.grad(lambda x: matmul_gated(x, weight).astype(jnp.float32).sum())(x)
    interpreted = functools.partial(product.__wrapped__, interpret=True)
    monkeypatch.setattr("mpjax.kernels.gemm.gated.product", interpreted)
    config = TritonConfig(8, 32, 1, 2, 3)
    monkeypatch.setattr("mpjax.kernels.gemm.gated.config_of", lambda x, weight: config)
    joint = jax.grad(lambda x: matmul_gated(x, weight).astype(jnp.float32).sum())(x)
    np.testing.assert_array_equal(np.asarray(joint), np.asarray(apart))


def test_wrong_arguments():
    weight = quantize(jnp.ones((64, 32)), "uint4:g32")
    with pytest.raises(ValueError, match="x has 32 channels"):
        matmul_gated(jnp.ones((1, 32), jnp.bfloat16), weight)
    with pytest.raises(ValueError, match="activation is 'relu'"):
        matmul_gated(jnp.ones((1, 64), jnp.bfloat16), weight, "relu")


@pytest.mark.gpu
@pytest.mark.parametrize("text", ["uint4:g128", "uint4:g128:sym", "uint8:g128", "table4:g64"])
@pytest.mark.parametrize("rows", [1, 5])
def test_on_the_gpu(text, rows, rng):
    weight = random_weight(rng, text, 4096, 24576)
    x = random_activations(rng, weight, rows, "bfloat16")
    assert config_of(x, weight) is not None
    found = jax.jit(matmul_gated)(x, weight)
    again = jax.jit(matmul_gated)(x, weight)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(again))
    wide = found.astype(jnp.float32)
    assert relative_error(wide, expected(x, weight, "silu")) < GATES["bfloat16"]
