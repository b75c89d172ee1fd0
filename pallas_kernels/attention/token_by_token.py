"""Batch-invariant attention in plain jnp: each token by itself, over tiles of a fixed size.

A token's tiles begin at fixed positions, and are added in their order, so the result depends on
neither the other tokens nor the size of the pages and block tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.kernels.batch import Span
from mpjax.kernels.kv_cache import hadamard, varlen
from mpjax.kernels.kv_cache import reference as kv_cache
from mpjax.kernels.kv_cache.cache import KVPages
from mpjax.kernels.kv_cache.layout import PAGE_SIZES
from mpjax.kernels.masks import Masks

TILE = PAGE_SIZES[-1]  # keys of a tile: a whole number of pages of any size
LEAST = -1e30  # below any score, and finite, so that a tile without keys has weights of 0


def paged_attention(
    queries: jax.Array, pages: KVPages, span: Span, masks: Masks, *, transformed: bool
) -> jax.Array:
    """Attention over pages without a residual; arguments and result as for api.paged_attention.

    span: a result of `Span.read`.
    """
    if pages.format.key_codes.hadamard and not transformed:
        [turned] = hadamard.transform_pieces([queries], queries.shape[-1], queries.dtype)
        queries = turned.astype(queries.dtype)

    def read(table: jax.Array) -> tuple[jax.Array, jax.Array]:
        return kv_cache.gather(pages, table, transformed=True)

    return over_cache(queries, pages, span, masks, read)


def over_cache(
    queries: jax.Array,
    pages: KVPages,
    span: Span,
    masks: Masks,
    read: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
) -> jax.Array:
    """Attention of queries [..., query heads, channels] over the keys and values from `read`.

    read: block table [1, entries] → keys and values [1, tokens, KV heads, channels].
    """
    *leading, heads, dim = queries.shape
    dtype, group = queries.dtype, (pages.keys.shape[1], -1)
    entries = TILE // pages.page_size
    width = jax.eval_shape(read, jnp.zeros((1, entries), jnp.int32))[1].shape[-1]
    tables = jnp.pad(span.block_tables, ((0, 0), (0, -span.block_tables.shape[1] % entries)))
    sequence, number, is_real = _places(span, tuple(leading))
    # A padding token has no keys: it visits no tile.
    ends = jnp.where(is_real, span.starts[sequence] + number + 1, 0)
    capacity = tables.shape[1] * pages.page_size
    sinks = None if masks.sinks is None else masks.sinks.astype(jnp.float32).reshape(group)

    def attend(token: tuple[jax.Array, ...]) -> jax.Array:
        query, table, end = token
        query = query.astype(jnp.float32).reshape(*group, dim)
        begin = jnp.int32(0) if masks.window is None else jnp.maximum(end - masks.window, 0)

        def add(tile: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            sums, total, peak = carry
            table_part = jax.lax.dynamic_slice(table, (tile * entries,), (entries,))
            keys, values = read(table_part[None])
            scores = masks.scale_for(dim) * _einsum("hgd,khd->hgk", query, keys[0])
            if masks.softcap is not None:
                scores = masks.softcap * jnp.tanh(scores / masks.softcap)
            position = tile * TILE + jnp.arange(TILE)
            is_seen = ((position >= begin) & (position < end))[None, None]
            new_peak = jnp.maximum(peak, jnp.where(is_seen, scores, LEAST).max(-1, keepdims=True))
            weights = jnp.where(is_seen, jnp.exp(scores - new_peak), 0.0)
            shrink = jnp.exp(peak - new_peak)
            product = _einsum("hgk,khd->hgd", weights, values[0])
            total = total * shrink + weights.sum(-1, keepdims=True)
            return sums * shrink + product, total, new_peak

        peak = jnp.full((*query.shape[:2], 1), LEAST) if sinks is None else sinks[..., None]
        begun = (
            jnp.zeros((*query.shape[:2], width)),
            jnp.full(peak.shape, 0.0 if sinks is None else 1.0),
            peak,
        )
        last = (jnp.minimum(end, capacity) + TILE - 1) // TILE
        sums, total, _ = jax.lax.fori_loop(begin // TILE, last, add, begun)
        return (sums / jnp.where(total == 0, 1.0, total)).reshape(heads, width).astype(dtype)

    tokens = queries.reshape(-1, heads, dim), tables[sequence], ends

    def put(index: jax.Array, found: jax.Array) -> jax.Array:
        token = (jax.lax.dynamic_index_in_dim(x, index, keepdims=False) for x in tokens)
        return found.at[index].set(attend(tuple(token)))

    # XLA would unroll a short loop of known length, and fuse its steps in other ways.
    empty = jnp.zeros((len(ends), heads, width), dtype)
    count = jax.lax.optimization_barrier(jnp.int32(len(ends)))
    return jax.lax.fori_loop(0, count, put, empty).reshape(*queries.shape[:-1], width)


def _einsum(axes: str, *arrays: jax.Array) -> jax.Array:
    return jnp.einsum(axes, *arrays, precision="highest", preferred_element_type=jnp.float32)


def _places(span: Span, leading: tuple[int, ...]) -> Any:
    """The sequence of each token, its number in the step, and whether it is real: [all tokens]."""
    if len(leading) == 1:
        found = varlen.tokens_of(span.counts, leading[0])
        return found.sequence, found.number, found.is_real
    batch, tokens = leading
    sequence, number = (x.reshape(-1) for x in jnp.indices((batch, tokens), jnp.int32))
    return sequence, number, number < span.counts[sequence]
