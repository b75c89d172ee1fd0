from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.kernels import WeightFormat, pack, quantize, unpack
from mpjax.models import Linear
from mpjax.quantization.learning.learned_linear import (
    Learned,
    LearnedLinear,
    why_not,
)

K, N = 64, 32
FORMATS = ("uint4:g32", "table3:g32", "liquid4:g64/int8", "int8/int8")


@pytest.fixture
def weight(rng):
    return jnp.asarray(rng.standard_normal((K, N)), jnp.float32)


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.standard_normal((3, K)), jnp.float32)


def changed(linear, gain=0.25, shift=None):
    learned = LearnedLinear(linear, learns_table=shift is not None)
    learned.gains.set_value(learned.gains.get_value() + gain)
    if shift is not None and learned.shifts is not None:
        learned.shifts.set_value(learned.shifts.get_value() + shift)
    return learned


@pytest.mark.parametrize("format", FORMATS)
def test_it_begins_as_the_map_itself_and_is_packed_as_it_computes(weight, x, format):
    linear = Linear(quantize(weight, format), jnp.ones(N))
    np.testing.assert_array_equal(LearnedLinear(linear)(x), linear(x))
    learned = changed(linear, shift=0.125)
    packed = learned.packed()
    assert type(packed) is Linear
    np.testing.assert_array_equal(learned(x), packed(x))
    np.testing.assert_array_equal(learned.terms(x)[0], packed(x))
    before, after = (unpack(it.kernel.get_value()) for it in (linear, packed))
    np.testing.assert_array_equal(before.codes, after.codes)
    if before.channel_scales is None:
        np.testing.assert_allclose(after.scales, 1.25 * before.scales, rtol=1e-3)
    else:
        np.testing.assert_allclose(after.channel_scales, 1.25 * before.channel_scales, rtol=1e-6)
    if before.table is not None:
        np.testing.assert_allclose(after.table, before.table + 0.125, rtol=1e-6)


def test_gradients_reach_gains_and_shifts_alone(weight, x):
    learned = LearnedLinear(Linear(quantize(weight, "table3:g32")), learns_table=True)
    graph, state, rest = nnx.split(learned, Learned, ...)
    assert len(jax.tree.leaves(state)) == 2

    def output(state):
        return nnx.merge(graph, state, rest)(x).sum()

    found = jax.grad(output)(state)
    plain = unpack(learned.kernel.get_value())
    parts = np.asarray(plain.table[plain.codes] * x.sum(0)[:, None], np.float64).reshape(2, -1, N)
    scales = np.asarray(plain.scales, np.float64)
    np.testing.assert_allclose(
        found["gains"].get_value(), parts.sum(1) * scales, rtol=2e-3, atol=1e-2
    )
    assert np.abs(found["shifts"].get_value()).min() > 0


@pytest.mark.parametrize("format", ["table2:g32", "liquid4:g64/int8"])
def test_codes_can_be_chosen_anew(weight, format):
    """The chosen codes are the nearest of the current grid to the latent weight."""
    linear = Linear(quantize(weight, format))
    held, chosen = LearnedLinear(linear), LearnedLinear(linear, latent=weight)
    for it in (held, chosen):
        it.gains.set_value(it.gains.get_value() - 0.4)
    errors = [
        float(jnp.abs(it.packed().kernel.get_value().dequantize() - weight).mean())
        for it in (held, chosen)
    ]
    assert errors[1] < 0.9 * errors[0]
    values = chosen.packed().kernel.get_value().dequantize()
    np.testing.assert_allclose(chosen(jnp.eye(K)), values, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("format", ["uint4:g32", "int4:g128/int8"])
def test_codes_are_chosen_anew_in_a_permuted_order(rng, format):
    """The permutation and the widths of activations are kept, and codes are those it began with."""
    weight = jnp.asarray(rng.standard_normal((2 * 128, N)), jnp.float32)
    order = jnp.asarray(rng.permutation(len(weight)), jnp.int32)
    plain = unpack(quantize(weight[order], format))
    widths = jnp.asarray([8, 4], jnp.uint8) if format.startswith("int4") else None
    kernel = pack(dataclasses.replace(plain, permutation=order, activation_bits=widths))
    learned = LearnedLinear(Linear(kernel), latent=weight)
    found = learned.packed().kernel.get_value()
    np.testing.assert_array_equal(found.permutation, order)
    np.testing.assert_array_equal(found.dequantize(), kernel.dequantize())
    if widths is not None:
        np.testing.assert_array_equal(found.activation_bits, widths)
    x = jnp.asarray(rng.standard_normal((3, len(weight))), jnp.float32)
    np.testing.assert_array_equal(learned(x), Linear(kernel)(x))


def test_scales_of_blocks_are_not_learned():
    assert why_not(WeightFormat.parse("float8:g128")) is not None
    assert "powers of two" in (why_not(WeightFormat.parse("float4:g32")) or "")
    assert all(why_not(WeightFormat.parse(text)) is None for text in (*FORMATS, "float8:gK"))
