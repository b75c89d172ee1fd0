"""Weights with leading axes, such as experts and layers, in `jax.vmap` and `jax.lax.scan`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import QuantizedTensor, matmul, matmul_terms
from mpjax.kernels.gemm.plans.configuration import TritonConfig
from mpjax.kernels.gemm.plans.operation import forced
from mpjax.kernels.plans.plan import Plan
from tests.pallas_kernels.gemm.weights import random_weight, weight_struct
from tests.pallas_kernels.oracles import random_array, relative_error, wide
from tests.sweeps import combinations

# One of each kind of codes; the K of some is padded to whole blocks.
KINDS = (
    *("uint4:g128", "uint8:gK", "uint4:g32:sym", "table4:g64", "table3:g64", "table2:g64"),
    *("float8:g128", "float8:gK/float8", "float8:g128/float8", "int8:gK/int8", "liquid4:g64/int8"),
)


def stacked(tensors: list[QuantizedTensor]) -> QuantizedTensor:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *tensors)


def experts(rng: np.random.Generator, text: str, *, permuted: bool = False):
    """Four weights [384, 24] and their stack."""
    each = [random_weight(rng, text, 384, 24, permuted=permuted) for _ in range(4)]
    return each, stacked(each)


@pytest.mark.one_of(5)
@pytest.mark.parametrize(
    ("text", "permuted"), [*((text, False) for text in KINDS), ("uint4:g128", True)]
)
def test_experts_tell_their_shape_and_multiply_under_vmap(text, permuted, rng):
    each, stack = experts(rng, text, permuted=permuted)
    x = random_array(rng, (4, 3, 384), "float32")
    seen = []

    def product(x, weight):
        seen.append((weight.shape, weight.padded_channels))
        return matmul(x, weight)

    found = jax.jit(jax.vmap(product))(x, stack)
    assert stack.shape == (4, 384, 24)
    assert seen == [((384, 24), each[0].padded_channels)]
    assert stack.padded_channels == each[0].padded_channels
    one = jax.jit(matmul)
    for rows, weight, of_expert in zip(x, each, found, strict=True):
        np.testing.assert_allclose(of_expert, one(rows, weight), rtol=1e-5, atol=1e-4)


def test_experts_multiply_in_triton(rng, interpreted_triton):
    each, stack = experts(rng, "uint4:g128")
    x = random_array(rng, (4, 3, 384), "bfloat16")
    with forced(Plan("triton", TritonConfig(16, 16, 1, 1, 3))):
        found = jax.jit(jax.vmap(matmul))(x, stack)
        expected = [jax.jit(matmul)(*pair) for pair in zip(x, each, strict=True)]
    np.testing.assert_array_equal(found, np.stack(expected))


@pytest.mark.one_of(3)
@pytest.mark.parametrize("text", ["uint4:g128", "liquid4:g64/int8", "float8:gK/float8"])
def test_experts_lower_for_cuda(text, lower_for_cuda, pretend_gpu):
    stack = jax.eval_shape(lambda w: stacked([w] * 4), weight_struct(text, 1024, 512))
    for rows in (1, 64, 2048):
        x = jax.ShapeDtypeStruct((4, rows, 1024), jnp.bfloat16)
        assert lower_for_cuda(jax.vmap(matmul), x, stack)


@pytest.mark.parametrize("text", ["uint4:g32", "table3:g64", "int8:gK/int8"])
def test_a_scan_over_layers(text, rng):
    layers = [random_weight(rng, text, 128, 128) for _ in range(3)]
    x = random_array(rng, (2, 128), "float32")

    def layer(x, weight):
        assert weight.shape == (128, 128)
        return jnp.tanh(matmul(x, weight)), None

    found, _ = jax.lax.scan(layer, x, stacked(layers))
    expected = x
    for weight in layers:
        expected = layer(expected, weight)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_derivatives_of_experts(rng):
    """With respect to x and to scales."""
    each, stack = experts(rng, "uint4:g128")
    x, scales = random_array(rng, (4, 3, 384), "float32"), stack.scales()[:, :3].astype("float32")

    def loss(x, weight, scales):
        return (matmul(x, weight, scales=scales) ** 2).sum()

    of_one = jax.jit(jax.grad(loss, argnums=(0, 2)))
    found = jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 2))))(x, stack, scales)
    for index, weight in enumerate(each):
        for stack_of, one in zip(found, of_one(x[index], weight, scales[index]), strict=True):
            np.testing.assert_allclose(stack_of[index], one, rtol=1e-4, atol=1e-3)


def test_leading_axes_are_for_vmap_or_scan(rng):
    _, stack = experts(rng, "uint4:g128")
    for product in (matmul, matmul_terms):
        with pytest.raises(
            ValueError,
            match=r"leading axes \(shape \(4, 384, 24\)\): expected a matrix .* jax\.vmap or jax",
        ):
            product(jnp.ones((4, 3, 384)), stack)


@pytest.mark.gpu
@combinations(1, text=KINDS, rows=[1, 16, 300, 2048])
def test_experts_on_the_gpu(text, rows, rng):
    """Whatever implementation is planned for one of them."""
    each = [random_weight(rng, text, 2048, 1536) for _ in range(3)]
    x = random_array(rng, (3, rows, 2048), "bfloat16")
    found, one = jax.jit(jax.vmap(matmul))(x, stacked(each)), jax.jit(matmul)
    for rows_of_one, weight, of_expert in zip(x, each, found, strict=True):
        assert relative_error(of_expert, wide(one(rows_of_one, weight))) < 2e-3
