"""The tokens that wait in 16 bits until their block is full (BitDecoding's residual KV cache).

They are on 16-bit pages of the size of a block, one for each sequence, so `append` writes them as
it writes others; it is given their positions in the block. A block is encoded when the first token
behind it comes, so that a token attends its own block in 16 bits, whether tokens come one by one or
a block at a time.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mpjax.kernels.kv_cache.cache import KVPages


def begin(lengths: jax.Array, block: int) -> jax.Array:
    """The position of the first token that waits: in the last block that has been begun."""
    return jnp.maximum(lengths - 1, 0) // block * block


def places(
    pages: KVPages, block_tables: jax.Array, starts: jax.Array, counts: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What `append` must be told to write new tokens to the residual, in place of its own.

    Block tables, starts and counts. A start may be negative: tokens before the block that waits
    in the end aren't written there.
    """
    assert pages.residual is not None
    lengths = jnp.minimum(starts + counts, block_tables.shape[1] * pages.page_size)
    rows = jnp.arange(len(starts), dtype=jnp.int32)[:, None]
    return rows, starts - begin(lengths, pages.residual.page_size), counts


def most_blocks(tokens: int, block: int) -> int:
    """How many blocks of a sequence `tokens` new tokens can complete."""
    return -(-tokens // block)
