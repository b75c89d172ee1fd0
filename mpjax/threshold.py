"""Thresholds of top-k and top-p by search instead of a sort, for logits divided among devices.

A sort would bring all logits of a row to each device. A search only counts: each device compares
its own logits with 15 candidates, the counts are added, and the next 15 candidates lie between two
of the last. Eight rounds of four bits find the exact float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

BITS, ROUNDS = 4, 8


def kth_largest(logits: jax.Array, k: jax.Array) -> jax.Array:
    """The k-th largest logit of each row, float32 [batch, 1].

    logits: float32 [batch, vocabulary]. k: int32, broadcastable to [batch, 1], at least 1; above
    the vocabulary's size the result is the smallest logit.
    """
    ones = jnp.ones(logits.shape, jnp.int32)
    return _largest(logits, ones, jnp.minimum(k, logits.shape[-1]))


def nucleus(logits: jax.Array, probabilities: jax.Array, mass: jax.Array) -> jax.Array:
    """The largest logit whose likelier tokens and itself have so much mass, float32 [batch, 1].

    logits, probabilities: float32 [batch, vocabulary]. mass: float32, broadcastable to [batch, 1].
    Where rounding leaves the sum of all below `mass`, the result is -inf.
    """
    return _largest(logits, probabilities, mass)


def _largest(logits: jax.Array, weights: jax.Array, wanted: jax.Array) -> jax.Array:
    """The largest value t for which the weights of logits of t or more sum to `wanted` or more."""
    order = _order(logits)
    found = jnp.zeros((logits.shape[0], 1), jnp.uint32)  # the order of t, its highest bits first
    steps = jnp.arange(1, 2**BITS, dtype=jnp.uint32)[None]  # [1, candidates]
    for shift in range(BITS * (ROUNDS - 1), -1, -BITS):
        candidates = found + (steps << shift)
        reached = order[:, None, :] >= candidates[:, :, None]  # [batch, candidates, vocabulary]
        sums = jnp.where(reached, weights[:, None, :], jnp.zeros((), weights.dtype)).sum(-1)
        step = (sums >= wanted).sum(-1, keepdims=True).astype(jnp.uint32)
        found = found + (step << shift)
    least = _order(jnp.full((), -jnp.inf, jnp.float32))
    return jnp.where(found > least, _value(found), -jnp.inf)


def _order(x: jax.Array) -> jax.Array:
    """Whole numbers uint32 in the order of float32 numbers, of which -0 is below 0."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _value(order: jax.Array) -> jax.Array:
    """The float32 numbers of which `_order` gives the order."""
    sign = jnp.uint32(1 << 31)
    bits = jnp.where(order >= sign, order ^ sign, ~order)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
