"""Prefills sequences again that outgrow the context of LongRoPE's short factors."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from mpjax.kernels import KVFormat
from mpjax.models.config import DecoderConfig
from mpjax.models.decoder import Decoder
from mpjax.models.state import DecoderCache


def reads_again(config: DecoderConfig, tokens: int) -> bool:
    """Whether any sequence of up to `tokens` cached tokens is ever prefilled again."""
    return (most := config.rereads_after) is not None and tokens > most


def read_again(
    model: Decoder,
    cache: DecoderCache,
    upcoming: jax.Array,
    text: Callable[[jax.Array], jax.Array],
) -> DecoderCache:
    """The cache before a step, with each sequence rotated by the factors for its length.

    upcoming: int32 [batch], the most tokens that the next steps add to each sequence. Sequences
        that outgrow the original context with them are prefilled again, one after another, with the
        long
        factors: their keys and values in the cache are replaced.
    text: returns the tokens of the sequence with a given index (int32 scalar), int32 [tokens], the
        cached ones first.
    """
    most = model.config.rereads_after
    if most is None or not reads_again(model.config, cache.capacity):
        return cache

    # Tokens should attend to what the cache stores, as in the first prefill. A fresh step does so
    # if nothing is quantised, and comes closest in formats with blocks, as it appends all tokens at
    # once.
    fresh = cache.format == KVFormat(16) or cache.format.block is not None

    def passes(cache: DecoderCache) -> jax.Array:
        assert cache.rotary_lengths is not None
        is_long = cache.lengths + upcoming > most
        return is_long & (upcoming > 0) & (cache.rotary_lengths <= most)

    def read(cache: DecoderCache) -> DecoderCache:
        row = jnp.argmax(passes(cache)).astype(jnp.int32)
        own = cache.rows(row[None])
        tokens = text(row)[None, :most]
        _, again = model.step(tokens, own.lengths, own.begin(jnp.full(1, most + 1)), fresh=fresh)
        return cache.with_rows(row[None], again)

    # A loop updates the pages in place; `cond` would copy them for its branches.
    return jax.lax.while_loop(lambda cache: passes(cache).any(), read, cache)
