"""Brings an array from a mapped file to the default device, a large one piece by piece.

To a GPU, XLA copies an array to page-locked memory first, as much as the array has, and keeps that
memory for later arrays. A table of the vocabulary has gigabytes. Pieces bound what is kept.
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
        # JAX may use the array's memory without a copy: a mapped file, which may change.
        return jax.device_put(array.copy())
    return jax.device_put(array) if array.nbytes <= PIECE_BYTES else put_pieces(array, PIECE_BYTES)


def put_pieces(array: np.ndarray, piece_bytes: int) -> jax.Array:
    """The array on the default device, to which about so many bytes are under way at a time.

    array: with an axis or more, and not empty. The device holds the array and a piece.
    """
    rows = max(1, piece_bytes * len(array) // array.nbytes)
    found = jnp.zeros(array.shape, array.dtype)
    for begin in range(0, len(array), rows):
        begin = max(0, min(begin, len(array) - rows))  # all pieces are alike, for one program
        found = jax.block_until_ready(_put(found, array[begin : begin + rows], jnp.int32(begin)))
    return found


@functools.partial(jax.jit, donate_argnums=0)
def _put(whole: jax.Array, piece: jax.Array, begin: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, piece, begin, 0)
