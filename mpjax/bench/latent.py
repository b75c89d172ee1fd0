"""Calls of attention over latents, for the benchmark of attention."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from mpjax.bench import filled_pages
from mpjax.kernels import (
    KVFormat,
    KVLayout,
    KVPages,
    PagedKVCache,
    Span,
    latent_attention,
    latent_format,
)
from mpjax.kernels.attention.shapes import AttentionShape

SCALE = 0.05  # of scores: so small that attention averages many tokens, as in a model
attend = functools.partial(latent_attention, scale=SCALE)

Call = tuple[jax.Array, jax.Array, KVPages, Span]  # arguments of `attend`


def call_of(shape: AttentionShape, format: KVFormat, page_size: int) -> Call:
    """Normally distributed queries of a shape's new tokens, and pages full of random latents.

    shape: has `rotary`, and sequences of equal length.
    """
    assert shape.rotary is not None
    layout = KVLayout(
        *(1, shape.head_dim, latent_format(format), page_size), value_dim=shape.rotary
    )
    cache = PagedKVCache.create(layout, layers=1, batch=shape.batch, max_tokens=shape.context)
    lengths = jnp.asarray(shape.lengths, jnp.int32)
    pages = filled_pages.fill(cache.layers[0], cache.block_tables, lengths, 0)
    counts = jnp.full(shape.batch, shape.queries, jnp.int32)
    heads = shape.batch, shape.queries, shape.query_heads
    queries, rotated = (
        jax.random.normal(jax.random.key(dim), (*heads, dim), jnp.bfloat16)
        for dim in (shape.head_dim, shape.rotary)
    )
    return queries, rotated, pages, Span(cache.block_tables, lengths - counts, counts)


def expected(call: Call) -> jax.Array:
    """The reference's result over the same cache."""
    return jax.jit(functools.partial(attend, implementation="reference"))(*call)
