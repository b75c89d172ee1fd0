"""Changes of linear maps: the plain formula, stacks, and derivatives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.kernels import device, quantize
from mpjax.models import FusedLinear, Linear, StepContext
from mpjax.models.low_rank import LowRank

IN, SIZES, RANK, PLACES = 64, (32, 16), 3, 2


def random(rng, *shape):
    return jnp.asarray(rng.normal(0, 0.3, shape), jnp.float32)


def fused(rng, bias):
    kernel = quantize(random(rng, IN, sum(SIZES)), "uint8:g32")
    return FusedLinear([Linear(kernel, random(rng, sum(SIZES)) if bias else None)], SIZES)


@pytest.mark.parametrize("bias", [False, True])
def test_a_stack_is_the_formula_of_each_sequence(rng, bias):
    """Padded and varlen tokens, of sequences with either adapter and with none, with a gain."""
    maps = fused(rng, bias)
    down = random(rng, PLACES, IN, 2 * RANK)
    ups = [random(rng, PLACES, RANK, size) for size in SIZES]
    gain = random(rng, PLACES, sum(SIZES))
    x, adapters = random(rng, 3, 4, IN), jnp.array([2, 0, 1])
    base = jnp.concatenate(maps(x), -1)
    product = base - maps.parts[0].bias.get_value()[None, None] if bias else base
    expected = np.array(base)
    for row, place in ((0, 1), (2, 0)):
        for index, up in enumerate(ups):
            columns = slice(sum(SIZES[:index]), sum(SIZES[: index + 1]))
            factor = down[place][:, index * RANK : (index + 1) * RANK]
            expected[row, :, columns] += np.asarray(x[row] @ factor @ up[place])
            change = gain[place][None, columns] * product[row, :, columns]
            expected[row, :, columns] += np.asarray(change)
    maps.adapter = LowRank(down, ups, gain, is_stack=True)
    found = maps(x, StepContext({}, adapters=adapters))
    assert [part.shape[-1] for part in found] == list(SIZES)
    np.testing.assert_allclose(jnp.concatenate(found, -1), expected, atol=1e-4)
    counts = jnp.full(3, 4)
    varlen = StepContext({}, counts=counts, adapters=adapters)
    terms = maps.terms(x.reshape(-1, IN), varlen)
    np.testing.assert_allclose(terms.sum(0), expected.reshape(-1, sum(SIZES)), atol=1e-4)
    np.testing.assert_allclose(jnp.concatenate(maps(x), -1), base, atol=1e-5)


def test_gradients_are_those_of_the_formula(rng):
    linear, x = Linear(quantize(random(rng, IN, 32), "uint4:g32")), random(rng, 2, 4, IN)
    down, up = random(rng, IN, RANK), random(rng, RANK, 32)
    weight, target = linear.kernel.get_value().dequantize(), random(rng, 2, 4, 32)
    linear.adapter = LowRank(down, [up])

    def loss(linear: Linear) -> jax.Array:
        return ((linear(x) - target) ** 2).sum()

    def formula(factors: tuple[jax.Array, jax.Array]) -> jax.Array:
        return ((x @ weight + x @ factors[0] @ factors[1] - target) ** 2).sum()

    found = nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(linear)
    expected = jax.grad(formula)((down, up))
    for one, other in zip(jax.tree.leaves(found), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("tokens", [1, 64])
def test_a_stack_is_added_by_kernels_on_a_gpu(lower_for_cuda, tokens):
    """No factors are gathered for rows, and no terms are copied."""
    shape, places = jax.ShapeDtypeStruct, 8
    factors = shape((places, 4096, 2 * 16), jnp.bfloat16)
    ups = [shape((places, 16, size), jnp.bfloat16) for size in (4096, 1024)]

    def add(terms, x, down, ups, adapters):
        counts = jnp.ones_like(adapters)
        context = StepContext({}, counts=counts, adapters=adapters)
        return LowRank(down, ups, is_stack=True).add_terms(terms, x, context)

    terms = shape((2, tokens, 5120), jnp.float32)
    x, adapters = shape((tokens, 4096), jnp.bfloat16), shape((tokens,), jnp.int32)
    with device.described_as("NVIDIA H200"):
        text = lower_for_cuda(add, terms, x, factors, ups, adapters)
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 2
    assert f"tensor<3x{tokens}x5120" not in text
    assert "tensor<64x4096x32xbf16>" not in text
