"""Whole numbers int32 in the order of float32 numbers, in which a search goes bit by bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

BITS = 4  # of a key that a round of the search finds
DIGITS = 1 << BITS
ROUNDS = 32 // BITS
LEAST = np.int32(np.iinfo(np.int32).min)  # below the key of every number


def key_of(x: jax.Array) -> jax.Array:
    """The keys int32 of numbers float32, of which -0 is below 0."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits >= 0, bits, bits ^ np.int32(np.iinfo(np.int32).max))


def number_of(keys: jax.Array) -> jax.Array:
    """The numbers float32 of keys int32; -inf for keys below that of -inf."""
    bits = jnp.where(keys >= 0, keys, keys ^ np.int32(np.iinfo(np.int32).max))
    least = key_of(jnp.full((), -jnp.inf, jnp.float32))
    return jnp.where(keys > least, jax.lax.bitcast_convert_type(bits, jnp.float32), -jnp.inf)
