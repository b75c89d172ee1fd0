"""Varlen tokens: the tokens of sequences one after another, without padding between sequences."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mpjax.kernels.batch import Span


class Tokens(NamedTuple):
    """The sequence of each varlen token, and the token's index in it.

    Tokens after the last sequence's tokens are padding.
    """

    sequence: jax.Array  # int32 [tokens]
    number: jax.Array  # int32 [tokens]
    is_real: jax.Array  # bool [tokens], false for padding


def tokens_of(counts: jax.Array, tokens: int) -> Tokens:
    """The sequence and index of each of `tokens` varlen tokens.

    counts: int32 [batch], the number of tokens of each sequence, in order.
    """
    ends = jnp.cumsum(counts)
    token = jnp.arange(tokens, dtype=counts.dtype)
    sequence = jnp.minimum(jnp.searchsorted(ends, token, side="right"), len(counts) - 1)
    return Tokens(sequence, token - (ends - counts)[sequence], token < ends[-1])


def as_single_tokens(span: Span, tokens: int, page_size: int) -> Span:
    """The span in which each of `tokens` varlen tokens is a separate sequence.

    A token's block table is only its page, [tokens, 1], and its start the slot in that page.
    Padding and tokens without a page have count 0.
    """
    sequence, number, is_real = tokens_of(span.counts, tokens)
    position = span.starts[sequence] + number
    entry = position // page_size
    entries = span.block_tables.shape[1]
    page = span.block_tables[sequence, jnp.clip(entry, 0, entries - 1)]
    is_real &= (entry >= 0) & (entry < entries)
    counts = is_real.astype(span.counts.dtype)
    return Span(page[:, None], position % page_size, counts, longest=1)
