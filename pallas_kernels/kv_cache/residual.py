"""The residual: the last tokens of a sequence, in 16 bits until their block is full (BitDecoding).

The residual is a set of 16-bit pages of the size of a block, one for each sequence. `append` writes
to it as to other pages, with positions in the block. A block is encoded when the first token after
it is appended. So a token always attends to its own block in 16 bits, whether tokens are appended
one by one or a block at a time.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mpjax.kernels.batch import Span
from mpjax.kernels.kv_cache.cache import KVPages


def begin(lengths: jax.Array, block: int) -> jax.Array:
    """The position of the first token in each residual: the start of the last block that has begun.

    lengths: int32 [batch], the numbers of tokens of sequences. block: tokens of a block.
    """
    return jnp.maximum(lengths - 1, 0) // block * block


def residual_span(pages: KVPages, span: Span) -> Span:
    """The span with which `append` writes new tokens to the residual.

    span: the positions of the new tokens in the encoded pages.

    A start may be negative. Tokens at negative positions are not written: only tokens of the block
    that is in the residual after the append have positions from 0 on.
    """
    assert pages.residual is not None
    capacity = span.block_tables.shape[1] * pages.page_size
    lengths = jnp.minimum(span.starts + span.counts, capacity)
    rows = span.residual_pages
    if rows is None:
        rows = jnp.arange(len(span.starts), dtype=jnp.int32)[:, None]
    starts = span.starts - begin(lengths, pages.residual.page_size)
    return Span(rows, starts, span.counts, longest=span.longest)


def first_block(span: Span, begins: jax.Array) -> jax.Array:
    """The position of the first block of each sequence that may have to be encoded, int32 [batch].

    begins: of the residuals before the new tokens. A block that is already encoded is skipped.
    """
    return begins if span.encoded is None else jnp.maximum(begins, span.encoded)


def first_tokens(span: Span, new: jax.Array | None) -> jax.Array:
    """The index of each sequence's first token among all new tokens, int32 [batch].

    new: [batch, tokens, KV heads, head dim], or varlen [tokens, KV heads, head dim]; or None if no
        new token is needed.
    """
    if new is None:
        return jnp.zeros_like(span.starts)
    if new.ndim == 3:
        return span.offsets
    return jnp.arange(len(span.starts), dtype=span.starts.dtype) * new.shape[1]


def most_blocks(tokens: int, block: int) -> int:
    """The most blocks of a sequence that `tokens` new tokens can complete."""
    return -(-tokens // block)
