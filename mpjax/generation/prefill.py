"""Prefills an empty cache with whole prompts, with the results of an engine's chunked prefill."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mpjax.kernels import KVFormat
from mpjax.models import Decoder
from mpjax.models.state import DecoderCache


def reads_exactly(format: KVFormat) -> bool:
    """Whether a fresh step equals attention to the cache, except for rounding.

    A fresh step attends to keys and values before they are quantised, and is faster. It is used
    only if the cache isn't quantised, so that prompts always attend to keys and values as stored.
    """
    return format == KVFormat(16)


def read_prompts(
    model: Decoder, tokens: jax.Array, lengths: jax.Array, cache: DecoderCache
) -> tuple[jax.Array, DecoderCache]:
    """Adds prompts to an empty cache; returns the logits after them, and the cache.

    tokens: int [batch, tokens], padded on the right. lengths: int32 [batch], tokens of each prompt.

    Every token attends to keys and values as the cache stores them. In formats with blocks, blocks
    are prefilled one after another, so that tokens attend to the codes of earlier blocks.

    Returns float32 logits [batch, vocabulary].
    """
    size, padded = cache.format.block, tokens.shape[1]
    if reads_exactly(cache.format):
        return model.step(tokens, lengths, cache, fresh=True)
    cache = cache.begin(lengths)
    if size is None or padded <= size:
        return model.step(tokens, lengths, cache)
    blocks = -(-padded // size)
    tokens = jnp.pad(tokens, ((0, 0), (0, blocks * size - padded)))

    def read(
        block: jax.Array, carry: tuple[jax.Array, DecoderCache]
    ) -> tuple[jax.Array, DecoderCache]:
        logits, cache = carry
        piece = jax.lax.dynamic_slice_in_dim(tokens, block * size, size, axis=1)
        counts = jnp.clip(lengths - block * size, 0, size)
        found, cache = model.step(piece, counts, cache)
        return jnp.where((counts > 0)[:, None], found, logits), cache

    logits = jnp.zeros((len(lengths), model.columns), jnp.float32)
    read_all: tuple[jax.Array, DecoderCache] = jax.lax.fori_loop(0, blocks, read, (logits, cache))
    return read_all
