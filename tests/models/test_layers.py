from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.kernels import (
    ActivationFormat,
    PlainCodes,
    QuantizedActivations,
    WeightFormat,
    pack,
    quantize,
)
from mpjax.kernels.gemm.plans import Plan, TritonConfig, forced
from mpjax.models import FusedLinear, Linear, RMSNorm
from mpjax.models.layers import Projection
from tests.models.small import CONFIG
from tests.pallas_kernels.oracles import random_array, relative_error, wide


@pytest.mark.parametrize("bias", [False, True])
def test_linear(bias, rng):
    kernel, x = random_array(rng, (8, 5), "float32"), random_array(rng, (2, 3, 8), "float32")
    offset = random_array(rng, (5,), "float32") if bias else None
    y = Linear(kernel, offset)(x)
    expected = wide(x) @ wide(kernel) + (0 if offset is None else wide(offset))
    np.testing.assert_allclose(y, expected, atol=1e-5)


def test_linear_with_a_quantized_kernel(rng):
    kernel = quantize(random_array(rng, (64, 6), "float32"), WeightFormat.parse("uint4:g32"))
    x = random_array(rng, (3, 64), "float32")
    assert relative_error(Linear(kernel)(x), wide(x) @ wide(kernel.dequantize())) < 1e-5


def test_linear_is_created_with_a_normal_kernel_and_no_bias():
    linear = Linear.create((400, 300), bias=True, dtype="bfloat16", rngs=nnx.Rngs(0))
    kernel: Any = linear.kernel.get_value()
    assert linear.bias is not None
    assert (kernel.shape, kernel.dtype) == ((400, 300), jnp.bfloat16)
    assert abs(wide(kernel).std() - 0.02) < 1e-3
    np.testing.assert_array_equal(wide(linear.bias.get_value()), np.zeros(300))
    assert Linear.create((4, 3), bias=False, dtype="float32", rngs=nnx.Rngs(0)).bias is None


@pytest.mark.parametrize("cuts", [(), (7,), (4, 7), (2,)])
def test_fused_linear_gives_the_same_however_its_parts_are_cut(cuts, rng):
    """Outputs of 4, 3 and 2 channels: by one part, by one each, or by parts across them."""
    kernel, bias = random_array(rng, (8, 9), "float32"), random_array(rng, (9,), "float32")
    x = random_array(rng, (2, 8), "float32")
    kernels, biases = jnp.split(kernel, list(cuts), 1), jnp.split(bias, list(cuts))
    fused = FusedLinear([Linear(k, b) for k, b in zip(kernels, biases, strict=True)], (4, 3, 2))
    outputs = fused(x)
    assert [output.shape for output in outputs] == [(2, 4), (2, 3), (2, 2)]
    expected = wide(x) @ wide(kernel) + wide(bias)
    np.testing.assert_allclose(np.concatenate(outputs, -1), expected, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("text", [None, "uint4:g32", "int8/int8"])
def test_terms_of_a_linear_map_add_up_to_it(text, bias, rng):
    kernel: Any = random_array(rng, (64, 6), "float32")
    if text is not None:
        kernel = quantize(kernel, WeightFormat.parse(text))
    linear = Linear(kernel, random_array(rng, (6,), "float32") if bias else None)
    assert linear.activations == ActivationFormat("int8" if text == "int8/int8" else None)
    x = random_array(rng, (2, 3, 64), "float32")
    terms = linear.terms(x)
    assert terms.shape[1:] == (2, 3, 6)
    np.testing.assert_allclose(terms.sum(0), linear(x), atol=1e-5)


def test_nothing_is_quantised_for_a_kernel_with_a_permutation(rng):
    """Its input channels are in another order than those of an input that comes quantised."""
    plain = PlainCodes("int8", jnp.zeros((64, 8), jnp.int8), jnp.ones((1, 8)))
    assert Linear(pack(plain)).activations == ActivationFormat("int8")
    order = jnp.asarray(rng.permutation(64).astype(np.int32))
    permuted = dataclasses.replace(plain, permutation=order)
    assert Linear(pack(permuted)).activations == ActivationFormat()


def test_a_kernel_leaves_its_terms_apart(rng, interpreted_triton):
    """In float32, so that whoever adds them rounds once."""
    plan = Plan("triton", TritonConfig(16, 16, 2, 4, 3))
    kernel = quantize(random_array(rng, (512, 16), "float32"), WeightFormat.parse("uint4:g64"))
    x = random_array(rng, (3, 512), "float16")
    fused = FusedLinear([Linear(kernel)], (12, 4))
    with forced(plan):
        terms = jax.jit(fused.terms)(x)
    assert (terms.shape, terms.dtype) == ((2, 3, 16), jnp.float32)
    assert relative_error(terms.sum(0), wide(x) @ wide(kernel.dequantize())) < 1e-4


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["int8/int8"], "int8"),
        (["int8/int8", "liquid4:g64/int8"], "int8"),
        (["float8:gK/float8"] * 2, "float8"),
        (["float8:gK/float8", "int8/int8"], "16-bit"),
        (["uint4:g32", "uint4:g64"], "16-bit"),
        (["int8/int8", None], "16-bit"),
        ([None, None], "16-bit"),
    ],
)
def test_the_activations_and_the_terms_of_fused_linear_maps(texts, expected, rng):
    kernel, offset = random_array(rng, (64, 8), "float32"), random_array(rng, (8,), "float32")
    kernels = [kernel if t is None else quantize(kernel, WeightFormat.parse(t)) for t in texts]
    fused = FusedLinear([Linear(k, offset) for k in kernels], (5, 8 * len(texts) - 5))
    assert fused.activations == ActivationFormat.parse(expected)
    x = random_array(rng, (2, 64), "float32")
    terms = fused.terms(x)
    assert terms.shape == (1, 2, 8 * len(texts))
    np.testing.assert_allclose(terms[0], np.concatenate(fused(x), -1), atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rms_norm(dtype, rng):
    norm = RMSNorm(16, 1e-5, dtype)
    norm.weight = nnx.Param(random_array(rng, (16,), dtype))
    x = random_array(rng, (2, 3, 16), dtype) * jnp.asarray(30, dtype)
    y = norm(x)
    assert y.dtype == x.dtype
    values = wide(x)
    expected = values / np.sqrt((values**2).mean(-1, keepdims=True) + 1e-5)
    expected *= wide(norm.weight.get_value())
    assert relative_error(y, expected) < (1e-6 if dtype == "float32" else 4e-3)


def test_rms_norm_of_zeros_is_zero():
    np.testing.assert_array_equal(RMSNorm(4, 1e-5, "float32")(jnp.zeros((2, 4))), 0)


@pytest.mark.parametrize("text", [None, "uint4:g32", "int8/int8"])
@pytest.mark.parametrize("has_residual", [False, True])
def test_a_norm_adds_terms_to_the_stream_first(has_residual, text, rng):
    norm = RMSNorm(64, 1e-5, "float32")
    norm.weight = nnx.Param(random_array(rng, (64,), "float32"))
    terms = random_array(rng, (3, 2, 5, 64), "float32")
    residual = random_array(rng, (2, 5, 64), "float32") if has_residual else None
    format = None if text is None else ActivationFormat.of(text)
    stream, normed = norm.add(terms, residual, format)
    expected = wide(terms).sum(0) + (0 if residual is None else wide(residual))
    np.testing.assert_allclose(stream, expected, atol=1e-5)
    assert isinstance(normed, QuantizedActivations) == (text == "int8/int8")
    if isinstance(normed, QuantizedActivations):
        normed = normed.dequantize()
    assert relative_error(normed, wide(norm(stream))) < (0.02 if text == "int8/int8" else 1e-6)


def test_a_norm_is_read_beside_its_products(rng):
    norm = RMSNorm(64, 1e-5, "float32", is_offset=True)
    terms, residual = (random_array(rng, shape, "float32") for shape in ((2, 3, 64), (3, 64)))
    matrix = random_array(rng, (5, 64), "float32")
    stream, found = norm.project(terms, residual, Projection(matrix))
    expected = norm.add(terms, residual, None)
    np.testing.assert_array_equal(stream, expected[0])
    np.testing.assert_array_equal(found.values, expected[1])
    assert relative_error(found.products, wide(found.values) @ wide(matrix).T) < 1e-5


def test_calling_a_layer_changes_nothing(rng):
    mlp = CONFIG.layers[0].mlp.build(CONFIG, nnx.Rngs(0))
    before = jax.tree.leaves(nnx.state(mlp))
    mlp(random_array(rng, (2, 64), "float32"))
    after = jax.tree.leaves(nnx.state(mlp))
    assert all(one is other for one, other in zip(before, after, strict=True))
