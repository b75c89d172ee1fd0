"""Copies an array from a memory-mapped file to the default device, piece by piece.

XLA stages a copy to a GPU in page-locked memory of the array's size, and keeps that memory. An
embedding has gigabytes, so large arrays are copied in pieces to bound it.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels.device import default_device

PIECE_BYTES = 64 << 20


def to_device(array: np.ndarray) -> jax.Array:
    """The array on the default device."""
    if default_device().platform == "cpu":
        # Copy: JAX may alias the array's memory, which is a memory-mapped file that may change.
        return jax.device_put(array.copy())
    return jax.device_put(array) if array.nbytes <= PIECE_BYTES else put_pieces(array, PIECE_BYTES)


def put_pieces(array: np.ndarray, piece_bytes: int) -> jax.Array:
    """The array on the default device, copied about `piece_bytes` at a time.

    array: not empty, with at least one axis. The device holds the array and one piece.
    """
    rows = max(1, piece_bytes * len(array) // array.nbytes)
    found = jnp.zeros(array.shape, array.dtype)
    for begin in range(0, len(array), rows):
        begin = max(0, min(begin, len(array) - rows))  # all pieces have one shape, for one program
        found = jax.block_until_ready(_put(found, array[begin : begin + rows], jnp.int32(begin)))
    return found


@functools.partial(jax.jit, donate_argnums=0)
def _put(whole: jax.Array, piece: jax.Array, begin: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, piece, begin, 0)
