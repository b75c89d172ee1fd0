"""The reference of attention, in plain jnp: oracle of the kernels, and implementation on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.kernels.batch import Span
from mpjax.kernels.kv_cache import hadamard, varlen
from mpjax.kernels.kv_cache import reference as kv_cache
from mpjax.kernels.kv_cache.cache import KVPages
from mpjax.kernels.masks import CAUSAL, Masks
from mpjax.kernels.optimized_once import optimized_once


@optimized_once()
def attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    masks: Masks = CAUSAL,
) -> jax.Array:
    """Causal softmax attention in float32: a query at position p attends to keys at positions ≤ p.

    queries: [batch, tokens, query heads, head dim].
    keys, values: [batch, keys, KV heads, head dim]; values may have other channels.
    positions: int32 [batch, tokens], of the queries.
    lengths: int32 [batch], the number of keys of each sequence.

    Returns [batch, tokens, query heads, channels of a value] in the dtype of the queries, with
    zeros for queries without keys.
    """
    batch, tokens, heads, dim = queries.shape
    grouped = queries.astype(jnp.float32).reshape(batch, tokens, keys.shape[2], -1, dim)
    scores = masks.scale_for(dim) * jnp.einsum(
        "bthgd,bkhd->bhgtk", grouped, keys.astype(jnp.float32), precision="highest"
    )
    if masks.softcap is not None:
        scores = masks.softcap * jnp.tanh(scores / masks.softcap)
    key = jnp.arange(keys.shape[1])
    visible = key[None, None] <= positions[..., None]  # [batch, tokens, keys]
    visible &= key[None, None] < lengths[:, None, None]
    if masks.window is not None:
        visible &= key[None, None] >= masks.first_key(positions)[..., None]
    visible = visible[:, None, None]
    scores = jnp.where(visible, scores, -jnp.inf)
    peak = jnp.maximum(scores.max(-1, keepdims=True), jnp.finfo(jnp.float32).min)
    sink = None
    if masks.sinks is not None:
        sink = masks.sinks.astype(jnp.float32).reshape(1, keys.shape[2], -1, 1, 1)
        peak = jnp.maximum(peak, sink)
    weights = jnp.exp(scores - peak)
    total = weights.sum(-1, keepdims=True)
    if sink is not None:
        total += jnp.exp(sink - peak)
    weights /= jnp.where(total == 0, 1.0, total)
    out = jnp.einsum("bhgtk,bkhd->bthgd", weights, values.astype(jnp.float32), precision="highest")
    return out.reshape(batch, tokens, heads, values.shape[-1]).astype(queries.dtype)


@optimized_once("transformed")
def paged_attention(
    queries: jax.Array,
    pages: KVPages,
    span: Span,
    masks: Masks = CAUSAL,
    *,
    transformed: bool = False,
) -> jax.Array:
    """Attention over the dequantised cache; arguments and result as for api.paged_attention."""
    dtype = queries.dtype
    if transformed and pages.format.key_codes.hadamard:
        queries = hadamard.transform(queries.astype(jnp.float32))  # its own inverse

    def read(*places: Any) -> tuple[jax.Array, jax.Array]:
        return kv_cache.gather(pages, *places)

    return over_cache(queries, span, masks, read).astype(dtype)


def over_cache(
    queries: jax.Array, span: Span, masks: Masks, read: Callable[..., tuple[jax.Array, jax.Array]]
) -> jax.Array:
    """Attention of new tokens, padded or varlen, over the keys and values from `read`.

    read: a function of the sequences' block tables, lengths and residual pages, such as
        `kv_cache.gather`; returns keys and values [batch, capacity, KV heads, channels].

    Returns [..., query heads, channels of a value] in the dtype of the queries.
    """
    leading, lengths, rows = queries.shape[:-1], span.ends, span.residual_pages
    rows = None if rows is None else rows[:, 0]
    block_tables, starts, counts = span.block_tables, span.starts, span.counts
    if queries.ndim == 3 and len(counts) == 1:  # the tokens of one sequence
        queries = queries[None]
    elif queries.ndim == 3:  # varlen: each token becomes a sequence of one query
        tokens = varlen.tokens_of(counts, len(queries))
        sequence = tokens.sequence
        rows = sequence if rows is None else rows[sequence]
        block_tables, lengths = block_tables[sequence], lengths[sequence]
        starts = starts[sequence] + tokens.number
        counts = tokens.is_real.astype(counts.dtype)
        queries = queries[:, None]
    keys, values = read(block_tables, lengths, rows)
    positions = starts[:, None] + jnp.arange(queries.shape[1])[None]
    out = attention(queries, keys, values, positions, starts + counts, masks)
    return out.reshape(*leading, values.shape[-1])
