"""The search in plain JAX, which also runs if devices have parts of a row."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mpjax.kernels.thresholds.keys import BITS, DIGITS, LEAST, ROUNDS, key_of, number_of


def threshold(numbers: jax.Array, wanted: jax.Array, weights: jax.Array | None) -> jax.Array:
    """The threshold of each row; see the public function. wanted: int32 [rows, 1]."""
    keys = key_of(numbers)
    weights = jnp.ones_like(keys) if weights is None else weights
    steps = jnp.arange(1, DIGITS, dtype=jnp.int32)[None]  # [1, candidates]

    def search(index: jax.Array, found: jax.Array) -> jax.Array:
        shift = BITS * (ROUNDS - 1 - index)
        candidates = found + (steps << shift)
        is_reached = keys[:, None, :] >= candidates[:, :, None]  # [rows, candidates, size]
        sums = jnp.where(is_reached, weights[:, None, :], 0).sum(-1)
        digit = (sums >= wanted).sum(-1, keepdims=True, dtype=jnp.int32)
        return found + (digit << shift)

    found = jax.lax.fori_loop(0, ROUNDS, search, jnp.full_like(wanted, LEAST))
    return jnp.where(wanted > 0, number_of(found), -jnp.inf)
