"""QK-norm, rotation and append as one Triton kernel.

A program processes one head of a token, or of several tokens one after another.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels.batch import Span
from mpjax.kernels.kv_cache import hadamard
from mpjax.kernels.kv_cache.cache import KVPages
from mpjax.kernels.kv_cache.writing import (
    Slot,
    find_slot,
    for_each,
    lanes,
    programs_for,
    shapes_of,
    targets,
    write,
)
from mpjax.kernels.launch import Settings, first_program_id, launch, load, store
from mpjax.kernels.rotary.rotation import Rotation


class _Operands(NamedTuple):
    """The inputs of the kernel: arrays outside of it, references inside."""

    span: Span
    terms: Any  # [splits, batch, tokens, heads, dim]
    rotation: Rotation


def rotate_and_append(
    terms: jax.Array,
    pages: KVPages,
    span: Span,
    rotation: Rotation,
    dtype: jnp.dtype,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, KVPages]:
    """Launches the kernel; queries and pages as api.rotate_and_append returns them.

    terms: [splits, batch, tokens, channels]. The pages are aliased.
    """
    splits, batch, tokens, _ = terms.shape
    heads = rotation.heads
    read, total = rotation.total, heads[0] + 2 * heads[1]
    operands = _Operands(span, terms.reshape(splits, batch, tokens, read, -1), rotation)
    first = len(jax.tree.leaves(operands))
    queries = jax.ShapeDtypeStruct((batch, tokens, heads[0], pages.head_dim), dtype)
    return launch(
        _kernel,
        operands,
        pages,
        out_shape=(queries, shapes_of(pages)),
        grid=(programs_for(batch * tokens, total), total),
        settings=Settings(f"rotate_and_append_{pages.format}".lower()),
        interpret=interpret,
        aliases={first + i: 1 + i for i in range(len(jax.tree.leaves(pages)))},
    )


def _kernel(operands: _Operands, before: KVPages, queries_ref: Any, pages: KVPages) -> None:
    program, head = first_program_id(), pl.program_id(1)
    rotate = functools.partial(_rotate, operands, queries_ref, pages, head)
    for_each(program, queries_ref.shape[0] * queries_ref.shape[1], rotate)


def _rotate(
    operands: _Operands,
    queries_ref: Any,  # [batch, tokens, query heads, dim]
    pages: KVPages,
    head: jax.Array,
    number: jax.Array,  # the token's index among the tokens of all sequences
) -> None:
    rotation, heads, norms = operands.rotation, operands.rotation.heads, operands.rotation.norms
    tokens, dim = queries_ref.shape[1], queries_ref.shape[3]
    batch, token = number // tokens, number % tokens
    is_query, is_value = head < heads[0], head >= heads[0] + heads[1]
    dtype = queries_ref.dtype

    # The slot comes first: two of its loads depend on each other, and the compiler moves no load up
    # past a store.
    slot = find_slot(operands.span, pages.page_size, batch, token)

    def rounded(x: jax.Array) -> jax.Array:
        return x.astype(dtype).astype(jnp.float32)

    # A head has as many pieces as a word has codes, and at least two, since channels of its two
    # halves are rotated together.
    pieces = max(2, *(side.codes.planes for side in pages.sides))
    width, half = dim // pieces, pieces // 2
    lane = lanes(width)
    target, is_real = targets(width)

    source = jnp.where(is_value, head - heads[1], head) if rotation.keys_as_values else head

    def load_piece(piece: int) -> jax.Array:
        total = jnp.zeros(len(lane), jnp.float32)
        for split in range(operands.terms.shape[0]):
            at = operands.terms.at[split, batch, token, source, piece * width + lane]
            total += load(at).astype(jnp.float32)
        return rounded(total)

    x = [load_piece(piece) for piece in range(pieces)]
    if norms is not None:
        square = functools.reduce(jnp.add, [piece * piece for piece in x])
        inverse = jax.lax.rsqrt(jnp.sum(jnp.where(is_real, square, 0.0)) / dim + norms.epsilon)

        def normalise(piece: int) -> jax.Array:
            channel = piece * width + lane
            query, key = norms.query.at[channel], norms.key.at[channel]
            weight = jnp.where(is_query, load(query), load(key)).astype(jnp.float32)
            if norms.values:
                weight = jnp.where(is_value, 1.0, weight)
            normed = rounded(x[piece] * inverse * weight)
            return normed if norms.values else jnp.where(is_value, x[piece], normed)

        x = [normalise(piece) for piece in range(pieces)]

    def turn(piece: int) -> jax.Array:
        angle = piece % half * width + lane
        cosine = load(rotation.cosines.at[batch, token, angle])
        sine = load(rotation.sines.at[batch, token, angle])
        other = x[(piece + half) % pieces] * (-sine if piece < half else sine)
        return jnp.where(is_value, x[piece], rounded(x[piece] * cosine + other))

    x = [turn(piece) for piece in range(pieces)]
    is_transformed = rotation.transform_queries and pages.format.key_codes.hadamard
    query = hadamard.transform_pieces(x, dim, dtype) if is_transformed else x
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
