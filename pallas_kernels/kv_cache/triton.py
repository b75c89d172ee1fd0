"""The append kernel: quantises new keys and values and writes them into their pages, in place."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import arithmetic, backend
from pallas_kernels.kv_cache import hadamard
from pallas_kernels.kv_cache import residual as residuals
from pallas_kernels.kv_cache.cache import KVPages, Side

UNGROUPED_ROWS = 32  # of a piece of a block in which no tokens share a scale


def append(
    pages: KVPages,
    keys: jax.Array,
    values: jax.Array,
    block_tables: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    *,
    interpret: bool = False,
) -> KVPages:
    """See api.append; pages without a residual.

    One program for each new token and KV head; the pages are aliased.
    """
    batch, tokens, heads, _ = keys.shape
    operands = _Operands(block_tables, starts, counts, keys, values)
    first = len(operands)
    return backend.pallas_call(
        functools.partial(_kernel, interpret=interpret),
        operands,
        pages,
        out_shape=like(pages),
        grid=(batch * tokens, heads),
        name=f"append_{pages.format}".lower(),
        warps=1,
        stages=1,
        interpret=interpret,
        aliases={first + i: i for i in range(len(jax.tree.leaves(pages)))},
    )


def flush(
    pages: KVPages,
    keys: jax.Array | None,
    values: jax.Array | None,
    first_tokens: jax.Array,
    tokens: int,
    block_tables: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    *,
    interpret: bool = False,
) -> KVPages:
    """See reference.flush. One program for each piece of a block that may be full, and KV head.

    A piece is a group of tokens, where these have scales in common. The pages are aliased, the
    residual too, although it stays as it is: what writes to it next then comes after.
    """
    assert pages.residual is not None
    block = pages.residual.page_size
    rows = pages.format.group or min(UNGROUPED_ROWS, pages.page_size)
    blocks = residuals.most_blocks(tokens, block)
    operands = _FlushOperands(block_tables, starts, counts, first_tokens, keys, values)
    first = len(jax.tree.leaves(operands))
    return backend.pallas_call(
        functools.partial(_flush_kernel, rows=rows, blocks=blocks, interpret=interpret),
        operands,
        pages,
        out_shape=like(pages),
        grid=(len(starts) * blocks * (block // rows), pages.keys.shape[1]),
        name=f"flush_{pages.format}".lower(),
        warps=8 if rows > UNGROUPED_ROWS else 4,
        stages=1,
        interpret=interpret,
        aliases={first + i: i for i in range(len(jax.tree.leaves(pages)))},
    )


def like(pages: KVPages) -> KVPages:
    """The shapes of the pages, for a kernel that takes over their buffers."""
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), pages)


class _Operands(NamedTuple):
    """What the kernel reads; references, inside of it."""

    block_tables: Any  # [batch, pages per sequence]
    starts: Any  # [batch]
    counts: Any  # [batch]
    keys: Any  # [batch, tokens, KV heads, head dim]
    values: Any


def _kernel(operands: _Operands, before: KVPages, pages: KVPages, *, interpret: bool) -> None:
    tokens, dim = operands.keys.shape[1], operands.keys.shape[3]
    program = backend.first_program_id()
    batch, token = program // tokens, program % tokens
    head = pl.program_id(1)
    slot = find_slot(operands, pages.page_size, batch, token)
    for side, source in zip(pages.sides, (operands.keys, operands.values), strict=True):
        width = dim // side.codes.planes
        pieces = [
            backend.load(source.at[batch, token, head, plane * width + lanes(width)])
            for plane in range(side.codes.planes)
        ]
        write(side, pieces, source.dtype, slot, head, interpret)


class _FlushOperands(NamedTuple):
    """What the kernel reads; references, inside of it."""

    block_tables: Any  # [batch, pages per sequence]
    starts: Any  # [batch]
    counts: Any  # [batch]
    first_tokens: Any  # [batch]
    keys: Any  # [tokens, KV heads, head dim] or None
    values: Any


def _flush_kernel(
    operands: _FlushOperands,
    before: KVPages,
    pages: KVPages,
    *,
    rows: int,
    blocks: int,
    interpret: bool,
) -> None:
    residual = pages.residual
    assert residual is not None
    block, dim = residual.page_size, residual.head_dim
    pieces = block // rows
    program = backend.first_program_id()
    batch, piece = program // (blocks * pieces), program % (blocks * pieces)
    head = pl.program_id(1)
    capacity = operands.block_tables.shape[1] * pages.page_size
    start = backend.load(operands.starts.at[batch])
    end = start + backend.load(operands.counts.at[batch])
    first = residuals.begin(jnp.minimum(start, capacity), block) + piece * rows

    @pl.when(first < residuals.begin(jnp.minimum(end, capacity), block))
    def _() -> None:
        row = jnp.arange(rows)[:, None]
        is_new = first + row >= start
        token = jnp.maximum(backend.load(operands.first_tokens.at[batch]) + first + row - start, 0)
        page = backend.load(operands.block_tables.at[batch, first // pages.page_size])
        slot = Slot(page, first % pages.page_size, jnp.bool_(True))

        def load(waiting: Any, new: Any, channel: jax.Array) -> jax.Array:
            x = backend.load(waiting.at[batch, head, first % block + row, channel[None, :]])
            if new is None:
                return x
            at = new.at[token, head, channel[None, :]]
            return jnp.where(is_new, backend.load_masked(at, is_new).astype(x.dtype), x)

        sources = (
            (residual.keys, operands.keys),
            (residual.values, operands.values),
        )
        for side, source in zip(pages.sides, sources, strict=True):
            width = dim // side.codes.planes
            planes = [
                load(*source, plane * width + lanes(width)) for plane in range(side.codes.planes)
            ]
            write(side, planes, source[0].dtype, slot, head, interpret)


class Slot(NamedTuple):
    """Where a token goes in the pages, or the first of several, and whether any goes there."""

    page: jax.Array
    position: jax.Array
    valid: jax.Array


def find_slot(tables: Any, page_size: int, batch: jax.Array, token: jax.Array) -> Slot:
    """The slot of a new token, in a kernel. `tables` has block_tables, starts and counts."""
    position = backend.load(tables.starts.at[batch]) + token
    entry = position // page_size
    entries = tables.block_tables.shape[1]
    valid = (token < backend.load(tables.counts.at[batch])) & (entry < entries) & (position >= 0)
    page = backend.load(tables.block_tables.at[batch, jnp.clip(entry, 0, entries - 1)])
    return Slot(page, position % page_size, valid)


def lanes(width: int) -> jax.Array:
    """Which of `width` channels each lane of a tile holds: 0 … width − 1 where that fills it.

    Else each run of neighbours as long as the odd factor of the width is filled up with its last,
    which changes no extremum, and leaves runs a power of two of lanes apart.
    """
    lane = jnp.arange(pl.next_power_of_2(width))
    # Of a minimum the compiler doesn't see that lanes are neighbours, and loads them one by one.
    if len(lane) == width:
        return lane
    run, filled = _run(width)
    return lane // filled * run + jnp.minimum(lane % filled, run - 1)


def targets(width: int) -> tuple[jax.Array, jax.Array]:
    """Where lanes are stored, and which are: two may not meet where that differs."""
    lane = jnp.arange(pl.next_power_of_2(width))
    if len(lane) == width:
        return lane, lane < width
    run, filled = _run(width)
    place = lane % filled
    beyond = width + lane // filled * (filled - run) + place - run
    is_first = place < run
    return jnp.where(is_first, lane // filled * run + place, beyond), is_first


def _run(width: int) -> tuple[int, int]:
    run = width // hadamard.order(width)
    return run, pl.next_power_of_2(run)


def write(
    side: Side,
    pieces: Sequence[jax.Array],
    dtype: jnp.dtype,
    slot: Slot,
    head: jax.Array,
    interpret: bool,
) -> None:
    """Encodes a head's key or value, or several on one page, and stores them, in a kernel.

    pieces: equal slices of its channels, as many as the codes have planes, or a multiple; each at
        its `lanes`. Of several tokens [tokens, lanes].
    dtype: of the vector.
    """
    scales = None
    if side.codes.scaling == "head":
        scales = [backend.load(side.parameters.at[head + jnp.arange(1)])] * len(pieces)
    elif side.codes.scaling == "static":
        width = side.parameters.shape[1] // len(pieces)
        channel = lanes(width)
        scales = [
            backend.load(side.parameters.at[head, i * width + channel]) for i in range(len(pieces))
        ]
    if side.codes.hadamard:
        pieces = transform(pieces, side.words.shape[3] * side.codes.planes, dtype, interpret)
    operations = arithmetic.of_kernel(interpret=interpret)
    slices, parameters = side.codes.encode(pieces, scales, side.parameter_dtype, operations)
    *tokens, _ = pieces[0].shape
    position = slot.position
    if tokens:
        position += jnp.arange(tokens[0])[:, None]
    width = side.words.shape[3] // len(slices)
    for i, words in enumerate(slices):
        lane, is_first = (jnp.expand_dims(x, tuple(range(len(tokens)))) for x in targets(width))
        target = side.words.at[slot.page, head, position, i * width + lane]
        mask = jnp.broadcast_to(slot.valid & is_first, target.shape)
        backend.store(target, words.astype(side.words.dtype), mask=mask)
    if side.codes.scaling == "token":
        target = side.parameters.at[
            slot.page, head, position if tokens else position + jnp.arange(1)
        ]
        backend.store(target, parameters[0], mask=jnp.broadcast_to(slot.valid, target.shape))
    elif side.codes.group is not None:
        group = slot.position // side.codes.group
        width = side.parameters.shape[3] // len(parameters)
        for i, found in enumerate(parameters):
            lane, is_first = (x[None, :] for x in targets(width))
            target = side.parameters.at[slot.page, head, group, i * width + lane]
            mask = jnp.broadcast_to(slot.valid & is_first, target.shape)
            backend.store(target, found, mask=mask)


def transform(
    pieces: Sequence[jax.Array], dim: int, dtype: jnp.dtype, interpret: bool
) -> list[jax.Array]:
    """The Hadamard transform of a head, or several, in a kernel; see `write`."""
    operations = arithmetic.of_kernel(interpret=interpret)
    return hadamard.transform_pieces(pieces, dim, dtype, operations)
