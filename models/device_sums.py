"""Sums over the devices among which a decoder is divided: the one place where they are made."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Float32 costs nothing in sums of up to so many bytes: they take the time of a signal between
# devices, as in 16 bits. Measured between two H100s by NVLink (`mpjax bench sums --devices 2`).
LATENCY_BYTES = 256 << 10


def summing_dtype(size: int, dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """The dtype in which devices add arrays of `size` numbers; dtype: of activations."""
    return jnp.dtype(jnp.float32 if size * 4 <= LATENCY_BYTES else dtype)


def add_over_devices(x: jax.Array, axis: str) -> jax.Array:
    """The sum of the x of all devices of a mesh axis, which each of them gets; in x's dtype."""
    return jax.lax.psum(x, axis)


def add_terms(terms: jax.Array, dtype: jax.typing.DTypeLike, axis: str) -> jax.Array:
    """The one term [1, ..., out] that is the sum of terms [splits, ..., out] of all devices.

    dtype: of activations; see `summing_dtype`.
    """
    total = terms.sum(0)
    return add_over_devices(total.astype(summing_dtype(total.size, dtype)), axis)[None]
