"""Sequences packed one after another, without padding between them: which token is whose."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Tokens(NamedTuple):
    """For each of the packed tokens: its sequence, its number in it, and whether it is one.

    Tokens past the last sequence are padding.
    """

    sequence: jax.Array  # int32 [tokens]
    number: jax.Array  # int32 [tokens]
    is_real: jax.Array  # bool [tokens]


def tokens_of(counts: jax.Array, tokens: int) -> Tokens:
    """What `tokens` packed tokens are, counts[b] of which belong to sequence b, in order."""
    ends = jnp.cumsum(counts)
    token = jnp.arange(tokens, dtype=counts.dtype)
    sequence = jnp.minimum(jnp.searchsorted(ends, token, side="right"), len(counts) - 1)
    return Tokens(sequence, token - (ends - counts)[sequence], token < ends[-1])


def as_single_tokens(
    block_tables: jax.Array, starts: jax.Array, counts: jax.Array, tokens: int, page_size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Block tables [tokens, 1], starts and counts with which each token is a sequence of its own.

    Its table is the one page that it belongs to, and its start the slot there.
    """
    sequence, number, is_real = tokens_of(counts, tokens)
    position = starts[sequence] + number
    entry = position // page_size
    entries = block_tables.shape[1]
    page = block_tables[sequence, jnp.clip(entry, 0, entries - 1)]
    is_real &= (entry >= 0) & (entry < entries)
    return page[:, None], position % page_size, is_real.astype(counts.dtype)
