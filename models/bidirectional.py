"""Bidirectional attention, as embedding models have it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mpjax.kernels import Masks


def whole_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, masks: Masks, counts: jax.Array | None
) -> jax.Array:
    """Bidirectional attention over whole sequences, in plain jnp.

    query: [batch, tokens, heads, head dim]. key, value: [batch, tokens, KV heads, head dim].
    counts: int32 [batch], the tokens of each sequence before its padding; None for all.
    masks: a window is the number of keys on each side, the token's own included.

    Returns [batch, tokens, heads, head dim]. It holds the scores of all pairs of tokens at once.
    """
    batch, tokens, heads, dim = query.shape
    grouped = query.reshape(batch, tokens, key.shape[2], -1, dim).astype(jnp.float32)
    keys, values = key.astype(jnp.float32), value.astype(jnp.float32)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", grouped, keys, precision="highest")
    scores *= dim**-0.5 if masks.scale is None else masks.scale
    if masks.softcap is not None:
        scores = masks.softcap * jnp.tanh(scores / masks.softcap)
    place = jnp.arange(tokens)
    distance = jnp.abs(place[:, None] - place[None])
    seen = distance < (tokens if masks.window is None else masks.window)
    seen = jnp.broadcast_to(seen, (batch, tokens, tokens))
    if counts is not None:  # a padded query attends to itself, so its softmax is finite
        seen &= (place[None] < counts[:, None])[:, None, :] | (distance == 0)[None]
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=-1)
    found = jnp.einsum("bkgqs,bskd->bqkgd", weights, values, precision="highest")
    return found.reshape(batch, tokens, heads, dim).astype(query.dtype)
