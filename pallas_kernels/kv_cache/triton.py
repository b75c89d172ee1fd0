"""The kernels that quantise keys and values and write them into their pages, in place."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels import device
from mpjax.kernels.batch import Span
from mpjax.kernels.kv_cache import residual as residuals
from mpjax.kernels.kv_cache.cache import KVPages, Side
from mpjax.kernels.kv_cache.writing import (
    Channels,
    Slot,
    find_slot,
    for_each,
    lanes,
    like,
    programs_for,
    write,
)
from mpjax.kernels.launch import Settings, first_program_id, launch, load, load_masked


class _Size(NamedTuple):
    """How large a piece of a block may be, and how many warps encode it."""

    width: int  # channels of each plane, where channels have scales
    elements: int  # otherwise
    warps: int


# Found on the H200. The few blocks that a token completes must be done soon; of a prompt's, there
# are enough to read whole sectors. Where sequences are few, hardly a step completes any block.
OF_A_TOKEN, OF_A_PROMPT = _Size(2, 2048, 1), _Size(16, 8192, 4)
FEW_SEQUENCES = 16


def append(
    pages: KVPages,
    keys: jax.Array,
    values: jax.Array,
    span: Span,
    *,
    interpret: bool = False,
) -> KVPages:
    """See api.append; pages without a residual.

    One program for each new token and KV head, or of many tokens for several; the pages are
    aliased.
    """
    batch, tokens, heads, _ = keys.shape
    operands = _Operands(span, keys, values)
    first = len(jax.tree.leaves(operands))
    return launch(
        _kernel,
        operands,
        pages,
        out_shape=like(pages),
        grid=(programs_for(batch * tokens, heads), heads),
        settings=Settings(f"append_{pages.format}".lower()),
        interpret=interpret,
        aliases={first + i: i for i in range(len(jax.tree.leaves(pages)))},
    )


def flush(
    pages: KVPages,
    keys: jax.Array | None,
    values: jax.Array | None,
    span: Span,
    *,
    interpret: bool = False,
) -> KVPages:
    """See reference.flush. Programs share the pieces of blocks that are full, of each KV head.

    In most steps of one token none is: so there are few programs, each of which takes every so many
    pieces. The pages are aliased, the residual too, although it stays as it is: what writes to it
    next then comes after.
    """
    assert pages.residual is not None
    first_tokens = residuals.first_tokens(span, keys)
    if keys is not None and values is not None:
        keys, values = (x.reshape(-1, *x.shape[-2:]) for x in (keys, values))
    block, heads, sequences = pages.residual.page_size, pages.keys.shape[1], len(span.starts)
    size = OF_A_TOKEN if span.most_tokens < block else OF_A_PROMPT
    cuts = [_Cut.of(side, min(block, pages.page_size), size) for side in pages.sides]
    pieces = heads * sum(cut.pieces(block) for cut in cuts)  # of a block
    blocks = residuals.most_blocks(span.most_tokens, block)  # of a sequence
    likely = 0 if keys is None else len(keys) // block * pieces
    operands = _FlushOperands(span, first_tokens, keys, values)
    first = len(jax.tree.leaves(operands))
    return launch(
        functools.partial(_flush_kernel, cuts=cuts, blocks=blocks),
        operands,
        pages,
        out_shape=like(pages),
        grid=(flush_programs(sequences * blocks * pieces, likely, sequences),),
        settings=Settings(f"flush_{pages.format}".lower(), warps=size.warps),
        interpret=interpret,
        aliases={first + i: i for i in range(len(jax.tree.leaves(pages)))},
    )


def flush_programs(pieces: int, likely: int, sequences: int) -> int:
    """How many programs share what may be so many pieces, and is likely to be so many."""
    idle = device.multiprocessors() * (1 if sequences <= FEW_SEQUENCES else 2)
    return min(pieces, max(likely, idle))


class _Operands(NamedTuple):
    """Arrays that the kernel reads; references, inside of it."""

    span: Span
    keys: Any  # [batch, tokens, KV heads, head dim]
    values: Any


def _kernel(operands: _Operands, before: KVPages, pages: KVPages) -> None:
    batch, tokens, _, dim = operands.keys.shape
    program, head = first_program_id(), pl.program_id(1)
    is_only_one = batch * tokens == pl.num_programs(0)

    def visit(number: jax.Array) -> None:
        sequence, token = number // tokens, number % tokens
        slot = find_slot(operands.span, pages.page_size, sequence, token)

        def append_token() -> None:
            for side, source in zip(pages.sides, (operands.keys, operands.values), strict=True):
                width = dim // side.codes.planes
                pieces = [
                    load(source.at[sequence, token, head, plane * width + lanes(width)])
                    for plane in range(side.codes.planes)
                ]
                write(side, pieces, source.dtype, slot, head)

        if is_only_one:  # rather than wait for whether it is valid
            append_token()
        else:
            pl.when(slot.valid)(append_token)

    for_each(program, batch * tokens, visit)


class _FlushOperands(NamedTuple):
    """Arrays that the kernel reads; references, inside of it."""

    span: Span
    first_tokens: Any  # [batch]
    keys: Any  # [tokens, KV heads, head dim] or None
    values: Any


class _Cut(NamedTuple):
    """How a block's keys, or values, are cut into pieces that can be encoded apart."""

    rows: int  # tokens
    width: int  # channels of each plane
    across: int  # pieces side by side

    @classmethod
    def of(cls, side: Side, most_rows: int, size: _Size) -> _Cut:
        """Tokens that share scales stay together, or else all channels of a token."""
        stored, planes = side.words.shape[3], side.codes.planes
        if side.codes.group is not None:
            width = max(width for width in range(1, size.width + 1) if stored % width == 0)
            return cls(side.codes.group, width, stored // width)
        rows = 1 << (size.elements // (stored * planes)).bit_length() - 1
        return cls(min(rows, most_rows), stored, 1)

    def pieces(self, block: int) -> int:
        """Of a block."""
        return block // self.rows * self.across


def _flush_kernel(
    operands: _FlushOperands,
    before: KVPages,
    pages: KVPages,
    *,
    cuts: Sequence[_Cut],
    blocks: int,
) -> None:
    program = first_program_id()
    residual = pages.residual
    assert residual is not None
    size, heads = residual.page_size, pages.keys.shape[1]
    span = operands.span
    capacity = span.block_tables.shape[1] * pages.page_size
    sequences = span.starts.shape[0]
    lane = jnp.arange(pl.next_power_of_2(sequences))
    mask = lane < sequences
    starts, counts = (load(x.at[lane], mask=mask, other=0) for x in (span.starts, span.counts))
    begins, ends = (
        residuals.begin(jnp.minimum(position, capacity), size)
        for position in (starts, starts + counts)
    )
    full = jnp.clip((ends - begins) // size, 0, blocks)  # blocks of each sequence
    behind = jnp.cumsum(full)
    pieces = [cut.pieces(size) for cut in cuts]

    def visit(task: jax.Array) -> None:
        rest, piece = task // sum(pieces), task % sum(pieces)
        number, head = rest // heads, rest % heads
        sequence = (behind <= number).astype(jnp.int32).sum()
        begin, start, earlier = (
            jnp.where(lane == sequence, x, 0).sum() for x in (begins, starts, behind - full)
        )
        block = _Block(sequence, head, begin + (number - earlier) * size, start)
        for side, cut in enumerate(cuts):
            of_side = piece - sum(pieces[:side])

            @pl.when((of_side >= 0) & (of_side < pieces[side]))
            def _(side: int = side, cut: _Cut = cut, of_side: jax.Array = of_side) -> None:
                _encode(operands, pages, block, side, cut, of_side)

    for_each(program, full.sum() * heads * sum(pieces), visit)


class _Block(NamedTuple):
    """One of which pieces are encoded."""

    sequence: jax.Array
    head: jax.Array
    begin: jax.Array  # the position of its first token
    start: jax.Array  # and of the first new one


def _encode(
    operands: _FlushOperands,
    pages: KVPages,
    block: _Block,
    side: int,
    cut: _Cut,
    piece: jax.Array,
) -> None:
    """A piece of a block's keys (side 0), or values (1)."""
    assert pages.residual is not None
    waiting = pages.residual.sides[side].words
    new = (operands.keys, operands.values)[side]
    first_row = piece // cut.across * cut.rows
    channels = Channels(piece % cut.across * cut.width, cut.width)
    row = first_row + jnp.arange(cut.rows)[:, None]
    is_new = block.begin + row >= block.start
    first_token = load(operands.first_tokens.at[block.sequence])
    token = jnp.maximum(first_token + block.begin + row - block.start, 0)
    position = block.begin + first_row
    page = load(operands.span.block_tables.at[block.sequence, position // pages.page_size])
    slot = Slot(page, position % pages.page_size, jnp.bool_(True))

    def load_plane(plane: int) -> jax.Array:
        of_plane = plane * cut.width * cut.across
        channel = (of_plane + channels.first + lanes(cut.width))[None, :]
        x = load(waiting.at[block.sequence, block.head, row, channel])
        if new is None:
            return x
        at = new.at[token, block.head, channel]
        return jnp.where(is_new, load_masked(at, is_new).astype(x.dtype), x)

    target = pages.sides[side]
    planes = [load_plane(plane) for plane in range(target.codes.planes)]
    write(target, planes, waiting.dtype, slot, block.head, channels)
