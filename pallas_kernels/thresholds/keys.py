"""Integer keys int32 that have the order of float32 numbers, for a search bit by bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

BITS = 4  # bits of a key that each round of the search finds
DIGITS = 1 << BITS
ROUNDS = 32 // BITS
LEAST = np.int32(np.iinfo(np.int32).min)  # below the key of every number


def key_of(x: jax.Array) -> jax.Array:
    """The keys int32 of numbers float32; -0 has a key below 0's."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits >= 0, bits, bits ^ np.int32(np.iinfo(np.int32).max))


def number_of(keys: jax.Array) -> jax.Array:
    """The numbers float32 of keys int32; -inf for keys below the key of -inf."""
    bits = jnp.where(keys >= 0, keys, keys ^ np.int32(np.iinfo(np.int32).max))
    least = key_of(jnp.full((), -jnp.inf, jnp.float32))
    return jnp.where(keys > least, jax.lax.bitcast_convert_type(bits, jnp.float32), -jnp.inf)
