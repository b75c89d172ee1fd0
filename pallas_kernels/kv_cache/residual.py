"""The residual: the last tokens of a sequence, in 16 bits until their block is full (BitDecoding).

The residual is a set of 16-bit pages of the size of a block, one for each sequence. `append` writes
to it as to other pages, with positions in the block. A block is encoded when the first token after
it comes. So a token always attends to its own block in 16 bits, whether tokens come one by one or a
block at a time.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mpjax.kernels.kv_cache.cache import KVPages


def begin(lengths: jax.Array, block: int) -> jax.Array:
    """The positions of the first tokens in the residual: the starts of the last, begun blocks.

    lengths: int32 [batch], the numbers of tokens of sequences. block: tokens of a block.
    """
    return jnp.maximum(lengths - 1, 0) // block * block


def places(
    pages: KVPages, block_tables: jax.Array, starts: jax.Array, counts: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The block tables, starts and counts with which `append` writes new tokens to the residual.

    block_tables, starts, counts: those of the append to the encoded pages.

    A start may be negative: only tokens of the block that is in the residual after the append are
    written to it, which have positions from 0 on.
    """
    assert pages.residual is not None
    lengths = jnp.minimum(starts + counts, block_tables.shape[1] * pages.page_size)
    rows = jnp.arange(len(starts), dtype=jnp.int32)[:, None]
    return rows, starts - begin(lengths, pages.residual.page_size), counts


def most_blocks(tokens: int, block: int) -> int:
    """The most blocks of a sequence that `tokens` new tokens can complete."""
    return -(-tokens // block)
