"""Varlen tokens: sequences one after another, without padding between them; which is whose."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mpjax.kernels.batch import Span


class Tokens(NamedTuple):
    """For each of the varlen tokens: its sequence, its number in it, and whether it is real.

    Tokens past the last sequence are padding.
    """

    sequence: jax.Array  # int32 [tokens]
    number: jax.Array  # int32 [tokens]
    is_real: jax.Array  # bool [tokens]


def tokens_of(counts: jax.Array, tokens: int) -> Tokens:
    """What `tokens` varlen tokens are, counts[b] of which belong to sequence b, in order."""
    ends = jnp.cumsum(counts)
    token = jnp.arange(tokens, dtype=counts.dtype)
    sequence = jnp.minimum(jnp.searchsorted(ends, token, side="right"), len(counts) - 1)
    return Tokens(sequence, token - (ends - counts)[sequence], token < ends[-1])


def as_single_tokens(span: Span, tokens: int, page_size: int) -> Span:
    """A span in which each of `tokens` varlen tokens is a sequence of its own.

    Its table is the one page that it belongs to, and its start the slot there.
    """
    sequence, number, is_real = tokens_of(span.counts, tokens)
    position = span.starts[sequence] + number
    entry = position // page_size
    entries = span.block_tables.shape[1]
    page = span.block_tables[sequence, jnp.clip(entry, 0, entries - 1)]
    is_real &= (entry >= 0) & (entry < entries)
    counts = is_real.astype(span.counts.dtype)
    return Span(page[:, None], position % page_size, counts, longest=1)
