"""Head norm, rotation and append as one kernel: a program owns a head of a token, or of several."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels.kv_cache import hadamard
from mpjax.kernels.kv_cache.cache import KVPages
from mpjax.kernels.kv_cache.writing import (
    Slot,
    find_slot,
    for_each,
    lanes,
    like,
    programs_for,
    targets,
    write,
)
from mpjax.kernels.launch import first_program_id, launch, load, store
from mpjax.kernels.rotary.reference import HeadNorms


class _Operands(NamedTuple):
    """What the kernel reads; references, inside of it."""

    block_tables: Any  # [batch, pages per sequence]
    starts: Any  # [batch]
    counts: Any  # [batch]
    terms: Any  # [splits, batch, tokens, heads, dim]
    cosines: Any  # [batch, tokens, dim / 2]
    sines: Any
    query_norm: Any  # [dim]
    key_norm: Any


def rotate_and_append(
    terms: jax.Array,
    pages: KVPages,
    cosines: jax.Array,
    sines: jax.Array,
    block_tables: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    dtype: jnp.dtype,
    heads: tuple[int, int],
    norms: HeadNorms | None,
    *,
    transform_queries: bool = False,
    interpret: bool = False,
) -> tuple[jax.Array, KVPages]:
    """Queries and pages, which are aliased; see the public function."""
    splits, batch, tokens, _ = terms.shape
    total = heads[0] + 2 * heads[1]
    operands = _Operands(
        block_tables,
        starts,
        counts,
        terms.reshape(splits, batch, tokens, total, -1),
        cosines,
        sines,
        None if norms is None else norms.query,
        None if norms is None else norms.key,
    )
    first = len(jax.tree.leaves(operands))
    queries = jax.ShapeDtypeStruct((batch, tokens, heads[0], pages.head_dim), dtype)
    return launch(
        functools.partial(
            _kernel,
            heads=heads,
            epsilon=0.0 if norms is None else norms.epsilon,
            transform_queries=transform_queries and pages.format.key_codes.hadamard,
        ),
        operands,
        pages,
        out_shape=(queries, like(pages)),
        grid=(programs_for(batch * tokens, total), total),
        name=f"rotate_and_append_{pages.format}".lower(),
        warps=1,
        stages=1,
        interpret=interpret,
        aliases={first + i: 1 + i for i in range(len(jax.tree.leaves(pages)))},
    )


def _kernel(
    operands: _Operands, before: KVPages, queries_ref: Any, pages: KVPages, **options: Any
) -> None:
    program, head = first_program_id(), pl.program_id(1)
    rotate = functools.partial(_rotate, operands, queries_ref, pages, head, **options)
    for_each(program, queries_ref.shape[0] * queries_ref.shape[1], rotate)


def _rotate(
    operands: _Operands,
    queries_ref: Any,  # [batch, tokens, query heads, dim]
    pages: KVPages,
    head: jax.Array,
    number: jax.Array,  # of the token, among all
    *,
    heads: tuple[int, int],
    epsilon: float,
    transform_queries: bool,
) -> None:
    tokens, dim = queries_ref.shape[1], queries_ref.shape[3]
    batch, token = number // tokens, number % tokens
    is_query, is_value = head < heads[0], head >= heads[0] + heads[1]
    dtype = queries_ref.dtype

    # First, as two of its loads follow one another, and none can move up past a store.
    slot = find_slot(operands, pages.page_size, batch, token)

    def rounded(x: jax.Array) -> jax.Array:
        return x.astype(dtype).astype(jnp.float32)

    # As many pieces as words have codes, and two at least: the halves that turn together.
    pieces = max(2, *(side.codes.planes for side in pages.sides))
    width, half = dim // pieces, pieces // 2
    lane = lanes(width)
    target, is_real = targets(width)

    def load_piece(piece: int) -> jax.Array:
        total = jnp.zeros(len(lane), jnp.float32)
        for split in range(operands.terms.shape[0]):
            at = operands.terms.at[split, batch, token, head, piece * width + lane]
            total += load(at).astype(jnp.float32)
        return rounded(total)

    x = [load_piece(piece) for piece in range(pieces)]
    if operands.query_norm is not None:
        square = functools.reduce(jnp.add, [piece * piece for piece in x])
        inverse = jax.lax.rsqrt(jnp.sum(jnp.where(is_real, square, 0.0)) / dim + epsilon)

        def normalise(piece: int) -> jax.Array:
            channel = piece * width + lane
            query, key = operands.query_norm.at[channel], operands.key_norm.at[channel]
            weight = jnp.where(is_query, load(query), load(key))
            return jnp.where(
                is_value, x[piece], rounded(x[piece] * inverse * weight.astype(jnp.float32))
            )

        x = [normalise(piece) for piece in range(pieces)]

    def turn(piece: int) -> jax.Array:
        angle = piece % half * width + lane
        cosine = load(operands.cosines.at[batch, token, angle])
        sine = load(operands.sines.at[batch, token, angle])
        other = x[(piece + half) % pieces] * (-sine if piece < half else sine)
        return jnp.where(is_value, x[piece], rounded(x[piece] * cosine + other))

    x = [turn(piece) for piece in range(pieces)]
    query = hadamard.transform_pieces(x, dim, dtype) if transform_queries else x
    for piece in range(pieces):
        at = queries_ref.at[batch, token, jnp.minimum(head, heads[0] - 1), piece * width + target]
        store(at, query[piece].astype(dtype), mask=is_query & is_real)
    for side, first, chosen in zip(
        pages.sides,
        (heads[0], heads[0] + heads[1]),
        (~is_query & ~is_value, is_value),
        strict=True,
    ):
        kv_head = jnp.clip(head - first, 0, heads[1] - 1)
        where = Slot(slot.page, slot.position, slot.valid & chosen)
        write(side, x, dtype, where, kv_head)
