"""Prefills prompts in chunks, so that a whole prompt's activations need not fit in memory."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from mpjax.models import Decoder
from mpjax.models.state import DecoderCache


def require_pieces(prompt: int, piece: int) -> None:
    """Raises ValueError unless chunks of `piece` tokens divide a prompt."""
    if piece < 1 or prompt % piece:
        raise ValueError(
            f"prompts have {prompt} tokens, which pieces of {piece} don't divide: choose a divisor"
        )


@functools.partial(jax.jit, static_argnames="piece", donate_argnames="cache")
def read_pieces(
    model: Decoder, tokens: jax.Array, cache: DecoderCache, piece: int
) -> tuple[jax.Array, jax.Array, DecoderCache]:
    """Prefills prompts into an empty cache, `piece` tokens of each row at a time.

    tokens: int32 [batch, tokens], a multiple of `piece`. Returns the most likely next tokens, int32
    [batch], their log-probabilities, float32 [batch], and the cache.
    """
    batch = tokens.shape[0]
    counts = jnp.full(batch, piece, jnp.int32)

    def read(
        cache: DecoderCache, part: jax.Array
    ) -> tuple[DecoderCache, tuple[jax.Array, jax.Array]]:
        logits, cache = model.step(part, counts, cache)
        best = logits.argmax(-1).astype(jnp.int32)
        logprob = logits.max(-1) - jax.nn.logsumexp(logits, -1)
        return cache, (best, logprob)

    parts = tokens.reshape(batch, -1, piece).swapaxes(0, 1)
    cache, (best, logprobs) = jax.lax.scan(read, cache, parts)
    return best[-1], logprobs[-1], cache
