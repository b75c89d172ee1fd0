from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import Masks
from mpjax.kernels.attention import reference
from tests.pallas_kernels.attention.scenes import scene, sinks_of
from tests.pallas_kernels.oracles import (
    random_array,
    relative_error,
    softmax_attention,
    wide,
)

SCALE = 0.125

attention = jax.jit(reference.attention)
attend = jax.jit(reference.paged_attention)


def paged(*arguments, **masks):
    return attend(*arguments, Masks(SCALE, **masks))


@pytest.mark.parametrize("window", [None, 1, 9])
@pytest.mark.parametrize(("kv_heads", "group"), [(2, 1), (1, 7), (2, 2)])
def test_attention(kv_heads, group, window, rng):
    queries = random_array(rng, (3, 6, kv_heads * group, 16), "float32")
    keys, values = (random_array(rng, (3, 20, kv_heads, 16), "float32") for _ in range(2))
    positions = np.array([[0], [5], [14]], np.int32) + np.arange(6, dtype=np.int32)
    lengths = np.array([6, 3, 20], np.int32)
    out = attention(
        queries,
        keys,
        values,
        jnp.asarray(positions),
        jnp.asarray(lengths),
        Masks(SCALE, window),
    )
    expected = softmax_attention(
        wide(queries), wide(keys), wide(values), positions, lengths, SCALE, window
    )
    assert relative_error(out, expected) < 1e-6
    # A row without a key, which the window makes, is zero in both.
    np.testing.assert_array_equal(np.asarray(out)[expected == 0], 0)


@pytest.mark.parametrize("text", ["KV16", "KV8", "K4Vfp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_paged_attention(text, dtype, rng):
    test = scene(rng, text, dtype, starts=[0, 37, 60, 0], counts=[7, 1, 5, 0], heads=(2, 3))
    gate = {"float32": 1e-5, "bfloat16": 4e-3, "float16": 5e-4}[dtype]
    for window in (None, 6):
        out = paged(*test.arguments, window=window)
        assert test.error(out, SCALE, window=window) < gate
    np.testing.assert_array_equal(np.asarray(out[3]), 0)


def test_softcap_and_sinks(rng):
    test = scene(rng, "KV16", "float32", starts=[0, 37, 0], counts=[7, 1, 0], heads=(2, 3))
    sinks = sinks_of(rng, 6)
    for masks in (
        {"softcap": 0.7},
        {"sinks": sinks},
        {"softcap": 2.0, "sinks": sinks, "window": 3},
    ):
        out = paged(*test.arguments, **masks)
        assert test.error(out, SCALE, **masks) < 1e-5
        assert np.isfinite(out).all()
        np.testing.assert_array_equal(out[2], 0)


def test_a_sink_far_above_all_scores_leaves_nothing(rng):
    test = scene(rng, "KV16", "float32", starts=[5], counts=[1], heads=(2, 1))
    out = paged(*test.arguments, sinks=jnp.array([1e4, -1e4]))
    np.testing.assert_array_equal(out[..., 0, :], 0)
    np.testing.assert_allclose(out[..., 1, :], paged(*test.arguments)[..., 1, :], atol=1e-6)


def test_huge_scores_do_not_overflow(rng):
    queries = random_array(rng, (1, 4, 2, 8), "float32") * 1e6
    keys = random_array(rng, (1, 4, 2, 8), "float32") * 1e6
    out = attention(
        queries,
        keys,
        keys,
        jnp.arange(4)[None],
        jnp.array([4]),
        Masks(1.0),
    )
    assert np.isfinite(out).all()


def test_gradients_are_numbers_even_where_nothing_is_visible(rng):
    keys = random_array(rng, (2, 5, 1, 8), "float32")
    positions, lengths = jnp.broadcast_to(jnp.arange(5), (2, 5)), jnp.array([0, 3])

    def total(keys):
        return reference.attention(keys, keys, keys, positions, lengths, Masks(1.0)).sum()

    gradient = np.asarray(jax.jit(jax.grad(total))(keys))
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[0], 0)
    assert np.abs(gradient[1]).max() > 0


def test_gradients_beside_a_large_sink_are_numbers(rng):
    """e to the power of a sink of 200 is beyond float32, and leaves its head's keys no weight."""
    queries, keys, values = (random_array(rng, (1, 5, 2, 8), "float32") for _ in range(3))
    positions, lengths = jnp.arange(5)[None], jnp.array([5])

    def total(queries, keys, values, sinks=None):
        masks = Masks(1.0, sinks=sinks)
        out = reference.attention(queries, keys, values, positions, lengths, masks)
        return (out @ jnp.arange(8.0)).sum()

    gradients = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3)))
    *found, of_sinks = gradients(queries, keys, values, jnp.array([200.0, -200.0]))
    without = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(queries, keys, values)
    for gradient, expected in zip(found, without, strict=True):
        np.testing.assert_array_equal(gradient[:, :, 0], 0)
        np.testing.assert_allclose(gradient[:, :, 1], expected[:, :, 1], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(of_sinks, 0)
