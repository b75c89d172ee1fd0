"""Everything between the query-key-value product and attention over the cache, in one operation."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels.checks import (
    as_arrays,
    as_dtype,
    norm_epsilon,
    require_floats,
    require_type,
    shown,
    whole_number,
)
from mpjax.kernels.implementation import choose
from mpjax.kernels.kv_cache import residual
from mpjax.kernels.kv_cache.api import (
    append,
    int32_places,
    make_room,
    require_pages,
    why_not_triton,
)
from mpjax.kernels.kv_cache.cache import KVPages
from mpjax.kernels.kv_cache.formats import KVFormat
from mpjax.kernels.kv_cache.packed import as_single_tokens
from mpjax.kernels.rotary import reference, triton
from mpjax.kernels.rotary.reference import HeadNorms


def rotate_and_append(
    terms: jax.Array,
    pages: KVPages,
    cosines: jax.Array,
    sines: jax.Array,
    block_tables: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    *,
    dtype: jax.typing.DTypeLike,
    heads: tuple[int, int],
    norms: HeadNorms | None = None,
    transform_queries: bool = False,
    implementation: Literal["triton", "reference"] | None = None,
) -> tuple[jax.Array, KVPages]:
    """Rotates queries and keys and appends keys and values to one layer's pages, in place.

    terms: [splits, batch, tokens, (query heads + 2 · KV heads) · dim], whose sum is the product of
        the query, key and value projections, side by side. Or packed, without the batch: the tokens
        of a sequence after those of the one before.
    cosines, sines: float32 [batch, tokens, dim / 2] of the angles of each position, or packed
        [tokens, dim / 2].
    pages, block_tables, starts, counts: as `append` takes them.
    heads: query heads and KV heads.
    norms: of queries and keys, each [dim], before the rotation, or None.
    transform_queries: whether queries, too, go through the Hadamard transform of the pages' keys,
        if theirs is a format with one: for `paged_attention(..., transformed=True)`, which then has
        nothing left to do.

    Returns the queries [batch, tokens, query heads, dim], or packed [tokens, query heads, dim], in
    `dtype`, and the pages. On the GPU this is one kernel, where XLA makes five; beside a residual
    two, or three for several tokens or packed ones. Raises ValueError for shapes that don't fit the
    pages or one another, and for starts and counts as `append` does; and UnsupportedError, with the
    reason, where a forced implementation can't run.
    """
    require_pages("rotate_and_append", pages)
    terms, cosines, sines = as_arrays(
        "rotate_and_append", terms=terms, cosines=cosines, sines=sines
    )
    require_floats("rotate_and_append", terms=terms, cosines=cosines, sines=sines)
    require_type("rotate_and_append: transform_queries", transform_queries, bool, np.bool)
    heads, norms = _heads(heads), _norms(norms)
    width = (heads[0] + 2 * heads[1]) * pages.head_dim
    if terms.shape[-1:] != (width,) or heads[1] != pages.keys.shape[1]:
        raise ValueError(
            f"rotate_and_append: terms have shape {terms.shape}, and the pages "
            f"{pages.keys.shape[1]} heads of {pages.head_dim}; {heads[0]} query and {heads[1]} KV "
            f"heads take {width} channels"
        )
    half = pages.head_dim // 2
    if terms.ndim not in (3, 4) or {cosines.shape, sines.shape} != {(*terms.shape[1:-1], half)}:
        raise ValueError(
            f"rotate_and_append: terms have shape {terms.shape}, cosines {cosines.shape} and sines "
            f"{sines.shape}: expected [splits, batch, tokens, channels] and [batch, tokens, "
            f"{half}], half of the pages' head dimension, or all without the batch where sequences "
            "are packed"
        )
    if norms is not None and {norms.query.shape, norms.key.shape} != {(pages.head_dim,)}:
        raise ValueError(
            f"rotate_and_append: norms have weights of shapes {norms.query.shape} for queries and "
            f"{norms.key.shape} for keys: expected ({pages.head_dim},), the pages' head dimension"
        )
    places = int32_places(
        "rotate_and_append", pages, block_tables, starts, counts, terms.shape[1:-1]
    )
    dtype = as_dtype("rotate_and_append: dtype", dtype)
    reason = why_not_triton(pages)
    if dtype not in (jnp.bfloat16, jnp.float16):
        reason = f"queries are {dtype}, expected bfloat16 or float16"
    default = "reference" if terms.size == 0 else "triton"
    implementation = choose(
        "rotate_and_append", implementation, default, ("triton", "reference"), lambda _: reason
    )

    is_packed = terms.ndim == 3
    if is_packed:
        # Each token becomes a sequence, or, beside a residual, all of them one.
        axis = -2 if pages.residual is None else -3
        terms, cosines, sines = (jnp.expand_dims(x, axis) for x in (terms, cosines, sines))

    def run(pages: KVPages, *places: jax.Array) -> tuple[jax.Array, KVPages]:
        module = triton if implementation == "triton" else reference
        return module.rotate_and_append(
            terms,
            pages,
            cosines,
            sines,
            *places,
            dtype,
            heads,
            norms,
            transform_queries=transform_queries,
        )

    batch, tokens = terms.shape[1:3]
    if pages.residual is None:
        if not is_packed:
            return run(pages, *places)
        queries, pages = run(pages, *as_single_tokens(*places, batch, pages.page_size))
        return queries[:, 0], pages
    if tokens == 1 and not is_packed:
        pages = make_room(pages, *places, implementation=implementation)
        assert pages.residual is not None
        queries, waiting = run(pages.residual, *residual.places(pages, *places))
        return queries, dataclasses.replace(pages, residual=waiting)
    # Several may complete a block: keys must be there before any of it is encoded.
    new = [jnp.zeros((batch, heads[1], tokens, pages.head_dim), dtype) for _ in range(2)]
    rows = jnp.arange(batch, dtype=jnp.int32)
    queries, rotated = run(
        KVPages(new[0], new[1], None, None, KVFormat()),
        rows[:, None],
        jnp.zeros_like(rows),
        jnp.full_like(rows, tokens) if is_packed else counts,
    )
    keys, values = (x.swapaxes(1, 2) for x in (rotated.keys, rotated.values))
    if is_packed:
        queries, keys, values = queries[0], keys[0], values[0]
    return queries, append(pages, keys, values, *places, implementation=implementation)


def rotate(x: jax.Array, cosines: jax.Array, sines: jax.Array) -> jax.Array:
    """Rotary embedding of x [batch, tokens, heads, dim], computed in float32 (RoFormer).

    cosines, sines: float32 [batch, tokens, dim / 2], or with 1 in the place of the batch or the
        tokens. Channel i turns with channel i + dim / 2, the convention of Hugging Face
        checkpoints.

    Raises ValueError for shapes that don't fit.
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


def _heads(heads: Any) -> tuple[int, int]:
    try:
        queries, keys = heads
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"rotate_and_append: heads is {shown(heads)}: expected a pair, query heads and KV heads"
        ) from error
    return (
        whole_number("rotate_and_append: query heads", queries),
        whole_number("rotate_and_append: KV heads", keys),
    )


def _norms(norms: Any) -> HeadNorms | None:
    if norms is None:
        return None
    require_type("rotate_and_append: norms", norms, HeadNorms, hint=", or None")
    query, key = as_arrays("rotate_and_append: norms", query=norms.query, key=norms.key)
    epsilon = norm_epsilon("rotate_and_append: norms: epsilon", norms.epsilon)
    return HeadNorms(query, key, epsilon)
