"""All-reduces of a divided decoder: every sum over devices is in this file."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Sums of at most this many bytes may be float32 at no cost: latency dominates, as in 16 bits.
# Measured between two H100s by NVLink (`mpjax bench sums --devices 2`).
LATENCY_BYTES = 256 << 10


def summing_dtype(size: int, dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """The dtype for a sum of `size` elements over devices; dtype: of activations."""
    return jnp.dtype(jnp.float32 if size * 4 <= LATENCY_BYTES else dtype)


def add_over_devices(x: jax.Array, axis: str) -> jax.Array:
    """All-reduces x over a mesh axis, in x's dtype."""
    return jax.lax.psum(x, axis)


def add_terms(terms: jax.Array, dtype: jax.typing.DTypeLike, axis: str) -> jax.Array:
    """All-reduces the sum of terms [splits, ..., out] to one term [1, ..., out].

    dtype: of activations; see `summing_dtype`.
    """
    total = terms.sum(0)
    return add_over_devices(total.astype(summing_dtype(total.size, dtype)), axis)[None]
