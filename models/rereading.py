"""Reads sequences again that pass the context up to which their rotary factors hold (LongRoPE)."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from mpjax.kernels import KVFormat
from mpjax.models.config import DecoderConfig
from mpjax.models.decoder import Decoder
from mpjax.models.state import DecoderCache


def reads_again(config: DecoderConfig, tokens: int) -> bool:
    """Whether sequences of up to so many tokens in a cache are ever read again."""
    return (most := config.rereads_after) is not None and tokens > most


def read_again(
    model: Decoder,
    cache: DecoderCache,
    upcoming: jax.Array,
    text: Callable[[jax.Array], jax.Array],
) -> DecoderCache:
    """The cache before a step, in which all tokens of a sequence have the factors of its length.

    upcoming: int32 [batch], the most tokens that the next steps add to each sequence. Those that
        pass the original context with them are read again, one after another, with the long
        factors: the keys and values that are in the cache are replaced.
    text: returns the tokens of a sequence, int32 [tokens], those in the cache first, for its number
        (int32 scalar).
    """
    most = model.config.rereads_after
    if most is None or not reads_again(model.config, cache.capacity):
        return cache

    # Tokens attend to what the cache stores, as when they were first read. A fresh step does so
    # where nothing is quantised, and is the nearest in formats with blocks, which it reads at once.
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

    # A loop updates the pages in place, where a `cond` would copy them for its branches.
    return jax.lax.while_loop(lambda cache: passes(cache).any(), read, cache)
