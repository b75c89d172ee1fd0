"""The operation between the QKV product and attention over the cache.

It applies QK-norm and the rotary embedding, and appends keys and values to the cache.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from mpjax.kernels.batch import Span
from mpjax.kernels.checks import as_array, as_arrays, as_dtype, require_floats, require_type
from mpjax.kernels.implementation import choose
from mpjax.kernels.kv_cache import residual
from mpjax.kernels.kv_cache.api import (
    append,
    make_room,
    read_span,
    require_pages,
    why_not_triton,
)
from mpjax.kernels.kv_cache.cache import KVPages
from mpjax.kernels.kv_cache.formats import KVFormat
from mpjax.kernels.kv_cache.varlen import as_single_tokens
from mpjax.kernels.rotary import reference, triton
from mpjax.kernels.rotary.rotation import Rotation


def rotate_and_append(
    terms: jax.Array,
    pages: KVPages,
    span: Span,
    rotation: Rotation,
    *,
    dtype: jax.typing.DTypeLike,
    implementation: Literal["triton", "reference"] | None = None,
) -> tuple[jax.Array, KVPages]:
    """Rotates queries and keys and appends keys and values to one layer's pages, in place.

    terms: [splits, batch, tokens, (query heads + 2 · KV heads) · head dim], or varlen [splits,
        tokens, …]. Their sum over splits is the concatenated product of the query, key and value
        projections. With Rotation.keys_as_values there are no values.
    pages, span: as for `append`.
    rotation: of queries and keys, with cosines and sines for the tokens' positions.
    dtype: of the queries, and of keys and values before they are encoded.

    Returns the queries [batch, tokens, query heads, head dim], or varlen [tokens, query heads, head
    dim], in `dtype`, and the pages. On the GPU this is one kernel, where XLA makes five. For pages
    with a residual it is two, or three if there are several or varlen tokens.

    Raises ValueError for shapes that don't fit the pages or each other, and for starts and counts
    as `append` does; and UnsupportedError, with the reason, if a forced implementation can't run.
    """
    terms, rotation = _read(terms, pages, rotation)
    span = read_span("rotate_and_append", span, pages, terms.shape[1:-1])
    dtype = as_dtype("rotate_and_append: dtype", dtype)
    implementation = _choose(terms, pages, dtype, implementation)
    is_varlen = terms.ndim == 3
    if is_varlen:
        # Each token becomes a separate sequence; for pages with a residual, all become one.
        axis = -2 if pages.residual is None else -3
        terms = jnp.expand_dims(terms, axis)
        rotation = rotation.map_angles(lambda x: jnp.expand_dims(x, axis))

    def run(pages: KVPages, span: Span) -> tuple[jax.Array, KVPages]:
        module = triton if implementation == "triton" else reference
        return module.rotate_and_append(terms, pages, span, rotation, dtype)

    batch, tokens = terms.shape[1:3]
    if pages.residual is None:
        if not is_varlen:
            return run(pages, span)
        queries, pages = run(pages, as_single_tokens(span, batch, pages.page_size))
        return queries[:, 0], pages
    if tokens == 1 and not is_varlen:
        pages = make_room(pages, span, implementation=implementation)
        assert pages.residual is not None
        queries, updated = run(pages.residual, residual.residual_span(pages, span))
        return queries, dataclasses.replace(pages, residual=updated)
    # Several tokens may complete a block, which can be encoded only after all of its keys are
    # rotated. So rotated keys and values first go to temporary pages, and are then appended.
    shape = batch, rotation.heads[1], tokens, pages.head_dim
    new = run(*_own_pages(shape, dtype, None if is_varlen else span.counts))
    queries, keys, values = _of_tokens(*new, is_varlen=is_varlen)
    return queries, append(pages, keys, values, span, implementation=implementation)


def _of_tokens(
    queries: jax.Array, pages: KVPages, *, is_varlen: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, and keys and values from temporary pages, with axes of tokens and heads."""
    keys, values = (x.swapaxes(1, 2) for x in (pages.keys, pages.values))
    return (queries[0], keys[0], values[0]) if is_varlen else (queries, keys, values)


def _choose(
    terms: jax.Array, pages: KVPages, dtype: jnp.dtype, wanted: str | None
) -> Literal["triton", "reference"]:
    reason = why_not_triton(pages)
    if dtype not in (jnp.bfloat16, jnp.float16):
        reason = f"queries are {dtype}, expected bfloat16 or float16"
    default = "reference" if terms.size == 0 else "triton"
    names = "triton", "reference"
    return choose("rotate_and_append", wanted, default, names, lambda _: reason)


def _read(terms: Any, pages: Any, rotation: Any) -> tuple[jax.Array, Rotation]:
    require_pages("rotate_and_append", pages)
    require_type("rotate_and_append: rotation", rotation, Rotation)
    terms = as_array("rotate_and_append: terms", terms)
    require_floats("rotate_and_append", terms=terms)
    rotation = rotation.read("rotate_and_append")
    _require_fitting(terms, pages, rotation)
    return terms, rotation


def _own_pages(
    shape: tuple[int, int, int, int], dtype: jnp.dtype, counts: jax.Array | None
) -> tuple[KVPages, Span]:
    """Temporary pages of zeros [batch, heads, tokens, dim], one for each sequence, and their span.

    counts: of each sequence's tokens; None if no sequence has padding.
    """
    keys, values = (jnp.zeros(shape, dtype) for _ in range(2))
    pages = KVPages(keys, values, None, None, KVFormat())
    rows = jnp.arange(shape[0], dtype=jnp.int32)
    tables, starts = rows[:, None], jnp.zeros_like(rows)
    return pages, Span(tables, starts, jnp.full_like(rows, shape[2]) if counts is None else counts)


def _require_fitting(terms: jax.Array, pages: KVPages, rotation: Rotation) -> None:
    """Raises ValueError for shapes that don't fit the pages or one another."""
    cosines, sines = rotation.cosines, rotation.sines
    heads, norms = rotation.heads, rotation.norms
    width = rotation.total * pages.head_dim
    alone = ", with keys_as_values" if rotation.keys_as_values else ""
    if terms.shape[-1:] != (width,) or heads[1] != pages.keys.shape[1]:
        raise ValueError(
            f"rotate_and_append: terms have shape {terms.shape}, and the pages "
            f"{pages.keys.shape[1]} heads of {pages.head_dim}; {heads[0]} query and {heads[1]} KV "
            f"heads take {width} channels{alone}"
        )
    half = pages.head_dim // 2
    if terms.ndim not in (3, 4) or {cosines.shape, sines.shape} != {(*terms.shape[1:-1], half)}:
        raise ValueError(
            f"rotate_and_append: terms have shape {terms.shape}, cosines {cosines.shape} and sines "
            f"{sines.shape}: expected [splits, batch, tokens, channels] and [batch, tokens, "
            f"{half}], half of the pages' head dimension, or all without the batch where tokens "
            "are varlen"
        )
    if norms is not None and {norms.query.shape, norms.key.shape} != {(pages.head_dim,)}:
        raise ValueError(
            f"rotate_and_append: norms have weights of shapes {norms.query.shape} for queries and "
            f"{norms.key.shape} for keys: expected ({pages.head_dim},), the pages' head dimension"
        )


def rotate(x: jax.Array, cosines: jax.Array, sines: jax.Array) -> jax.Array:
    """Rotary embedding of x [batch, tokens, heads, head dim], computed in float32 (RoFormer).

    cosines, sines: of each token's angles, [batch, tokens, head dim / 2], or with 1 instead of the
        batch or of the tokens. Channels i and i + head dim / 2 form a pair that is rotated
        together, the convention of Hugging Face checkpoints.

    Returns an array of the shape and dtype of x. Raises ValueError for shapes that don't fit.
    """
    x, cosines, sines = as_arrays("rotate", x=x, cosines=cosines, sines=sines)
    require_floats("rotate", x=x, cosines=cosines, sines=sines)
    batch, tokens, _, dim = x.shape if x.ndim == 4 else (0, 0, 0, 1)
    fitting = {(b, t, dim // 2) for b in (1, batch) for t in (1, tokens)}
    if dim % 2 or not {cosines.shape, sines.shape} <= fitting:
        raise ValueError(
            f"rotate: x has shape {x.shape}, cosines {cosines.shape} and sines {sines.shape}: "
            "expected [batch, tokens, heads, dim] and, of both, [batch, tokens, dim / 2]"
        )
    return reference.rotate(x, cosines, sines)
