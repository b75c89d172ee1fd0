"""The Triton kernels that encode keys and values and write them into their pages, in place."""

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
    programs_for,
    shapes_of,
    write,
)
from mpjax.kernels.launch import Settings, first_program_id, launch, load, load_masked


class _Size(NamedTuple):
    """The largest piece of a block that a program encodes, and the program's warps."""

    width: int  # the most channels of each plane, if channels have scales
    elements: int  # the most keys or values times channels, if channels have no scales
    warps: int


# Measured on an H200. A step of one token completes few blocks: small pieces finish soonest. A
# prompt completes many: large pieces read whole sectors of memory.
TOKEN_SIZE, PROMPT_SIZE = _Size(2, 2048, 1), _Size(16, 8192, 4)
FEW_SEQUENCES = 16  # with no more sequences, most steps of one token complete no block


def append(
    pages: KVPages,
    keys: jax.Array,
    values: jax.Array,
    span: Span,
    *,
    interpret: bool = False,
) -> KVPages:
    """`api.append` for pages without a residual and keys [batch, tokens, KV heads, head dim].

    A program encodes a new token of a KV head, or several if there are many tokens. The pages are
    aliased.
    """
    batch, tokens, heads, _ = keys.shape
    operands = _Operands(span, keys, values)
    first = len(jax.tree.leaves(operands))
    return launch(
        _kernel,
        operands,
        pages,
        out_shape=shapes_of(pages),
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
    """`reference.flush` as a kernel, whose programs share the pieces of all complete blocks.

    Most steps of one token complete no block. So there are few programs, and program i processes
    pieces i, i + programs and so on. The pages are aliased, and so is the residual, although it
    does not change: then its next writes come after these reads.
    """
    assert pages.residual is not None
    first_tokens = residuals.first_tokens(span, keys)
    if keys is not None and values is not None:
        keys, values = (x.reshape(-1, *x.shape[-2:]) for x in (keys, values))
    block, heads, sequences = pages.residual.page_size, pages.keys.shape[1], len(span.starts)
    size = TOKEN_SIZE if span.most_tokens < block else PROMPT_SIZE
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
        out_shape=shapes_of(pages),
        grid=(flush_programs(sequences * blocks * pieces, likely, sequences),),
        settings=Settings(f"flush_{pages.format}".lower(), warps=size.warps),
        interpret=interpret,
        aliases={first + i: i for i in range(len(jax.tree.leaves(pages)))},
    )


def flush_programs(pieces: int, likely: int, sequences: int) -> int:
    """The number of programs of `flush`.

    pieces: the most pieces that are possible. likely: the expected number.
    """
    idle = device.multiprocessors() * (1 if sequences <= FEW_SEQUENCES else 2)
    return min(pieces, max(likely, idle))


class _Operands(NamedTuple):
    """The inputs of the append kernel: arrays outside of it, references inside."""

    span: Span
    keys: Any  # [batch, tokens, KV heads, head dim]
    values: Any


def _kernel(operands: _Operands, before: KVPages, pages: KVPages) -> None:
    batch, tokens, *_ = operands.keys.shape
    program, head = first_program_id(), pl.program_id(1)
    is_only_one = batch * tokens == pl.num_programs(0)

    def visit(number: jax.Array) -> None:
        sequence, token = number // tokens, number % tokens
        slot = find_slot(operands.span, pages.page_size, sequence, token)

        def append_token() -> None:
            for side, source in zip(pages.sides, (operands.keys, operands.values), strict=True):
                width = source.shape[3] // side.codes.planes
                pieces = [
                    load(source.at[sequence, token, head, plane * width + lanes(width)])
                    for plane in range(side.codes.planes)
                ]
                write(side, pieces, source.dtype, slot, head)

        if is_only_one:  # no branch, which would wait for the load of `slot.valid`
            append_token()
        else:
            pl.when(slot.valid)(append_token)

    for_each(program, batch * tokens, visit)


class _FlushOperands(NamedTuple):
    """The inputs of the flush kernel: arrays outside of it, references inside."""

    span: Span
    first_tokens: Any  # int32 [batch], the index of each sequence's first token in `keys`
    keys: Any  # [tokens, KV heads, head dim] or None
    values: Any


class _Cut(NamedTuple):
    """The size of pieces of a block's keys or values; each piece is encoded separately."""

    rows: int  # tokens of a piece
    width: int  # its channels of each plane
    across: int  # the number of pieces that share the same tokens

    @classmethod
    def of(cls, side: Side, most_rows: int, size: _Size) -> _Cut:
        """Pieces with whole groups of tokens if channels have scales, else with whole tokens."""
        stored, planes = side.words.shape[3], side.codes.planes
        if side.codes.group is not None:
            width = max(width for width in range(1, size.width + 1) if stored % width == 0)
            return cls(side.codes.group, width, stored // width)
        rows = 1 << (size.elements // (stored * planes)).bit_length() - 1
        return cls(min(rows, most_rows), stored, 1)

    def pieces(self, block: int) -> int:
        """The number of pieces of a block of `block` tokens."""
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
    if span.encoded is not None:
        encoded = load(span.encoded.at[lane], mask=mask, other=0)
        begins = jnp.maximum(begins, encoded)
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
            side_piece = piece - sum(pieces[:side])

            @pl.when((side_piece >= 0) & (side_piece < pieces[side]))
            def _(side: int = side, cut: _Cut = cut, side_piece: jax.Array = side_piece) -> None:
                _encode(operands, pages, block, side, cut, side_piece)

    for_each(program, full.sum() * heads * sum(pieces), visit)


class _Block(NamedTuple):
    """A complete block of a sequence and KV head, to be encoded."""

    sequence: jax.Array
    head: jax.Array
    begin: jax.Array  # the position of its first token
    start: jax.Array  # the position of the sequence's first new token


def _encode(
    operands: _FlushOperands,
    pages: KVPages,
    block: _Block,
    side: int,
    cut: _Cut,
    piece: jax.Array,
) -> None:
    """Encodes a piece of a block's keys (side 0) or values (side 1), and stores it."""
    assert pages.residual is not None
    residual = pages.residual.sides[side].words
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

    waiting = block.sequence
    if operands.span.residual_pages is not None:
        waiting = load(operands.span.residual_pages.at[block.sequence, jnp.int32(0)])

    def load_plane(plane: int) -> jax.Array:
        first_of_plane = plane * cut.width * cut.across
        channel = (first_of_plane + channels.first + lanes(cut.width))[None, :]
        x = load(residual.at[waiting, block.head, row, channel])
        if new is None:
            return x
        at = new.at[token, block.head, channel]
        return jnp.where(is_new, load_masked(at, is_new).astype(x.dtype), x)

    target = pages.sides[side]
    planes = [load_plane(plane) for plane in range(target.codes.planes)]
    write(target, planes, residual.dtype, slot, block.head, channels)
