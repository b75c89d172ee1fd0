"""The kernels that quantise keys and values and write them into their pages, in place."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.kv_cache import residual as residuals
from pallas_kernels.kv_cache.cache import KVPages, Side
from pallas_kernels.kv_cache.writing import (
    Channels,
    Slot,
    find_slot,
    for_each,
    lanes,
    like,
    programs_for,
    write,
)


class _Size(NamedTuple):
    """Of a piece of a block: channels of each plane, or elements; and the warps that encode it."""

    width: int
    elements: int
    warps: int


# Found on the H200. The few blocks that a token completes must be done soon; of a prompt's, there
# are enough to read whole sectors. Where sequences are few, hardly a step completes any block.
OF_A_TOKEN, OF_A_PROMPT = _Size(2, 2048, 1), _Size(16, 8192, 4)
FEW_SEQUENCES = 16


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

    One program for each new token and KV head, or of many tokens for several; the pages are
    aliased.
    """
    batch, tokens, heads, _ = keys.shape
    operands = _Operands(block_tables, starts, counts, keys, values)
    first = len(operands)
    return backend.pallas_call(
        functools.partial(_kernel, interpret=interpret),
        operands,
        pages,
        out_shape=like(pages),
        grid=(programs_for(batch * tokens, heads), heads),
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
    """See reference.flush. Programs share the pieces of blocks that are full, of each KV head.

    In most steps of one token none is: so there are few programs, and each takes the next piece
    that is left. The pages are aliased, the residual too, although it stays as it is: what writes
    to it next then comes after.
    """
    assert pages.residual is not None
    block, heads, sequences = pages.residual.page_size, pages.keys.shape[1], len(starts)
    size = OF_A_TOKEN if tokens < block else OF_A_PROMPT
    cuts = [_Cut.of(side, pages.page_size, size) for side in pages.sides]
    pieces = heads * sum(cut.pieces(block) for cut in cuts)  # of a block
    most = sequences * residuals.most_blocks(tokens, block) * pieces
    at_least = backend.multiprocessors() * (1 if sequences <= FEW_SEQUENCES else 2)
    programs = max(at_least, sequences * (tokens // block) * pieces)
    operands = _FlushOperands(block_tables, starts, counts, first_tokens, keys, values)
    first = len(jax.tree.leaves(operands))
    return backend.pallas_call(
        functools.partial(_flush_kernel, cuts=cuts, interpret=interpret),
        operands,
        pages,
        out_shape=like(pages),
        grid=(min(most, programs),),
        name=f"flush_{pages.format}".lower(),
        warps=size.warps,
        stages=1,
        interpret=interpret,
        aliases={first + i: i for i in range(len(jax.tree.leaves(pages)))},
    )


class _Operands(NamedTuple):
    """What the kernel reads; references, inside of it."""

    block_tables: Any  # [batch, pages per sequence]
    starts: Any  # [batch]
    counts: Any  # [batch]
    keys: Any  # [batch, tokens, KV heads, head dim]
    values: Any


def _kernel(operands: _Operands, before: KVPages, pages: KVPages, *, interpret: bool) -> None:
    batch, tokens, _, dim = operands.keys.shape
    head = pl.program_id(1)

    def see(number: jax.Array) -> None:
        sequence, token = number // tokens, number % tokens
        slot = find_slot(operands, pages.page_size, sequence, token)

        def store() -> None:
            for side, source in zip(pages.sides, (operands.keys, operands.values), strict=True):
                width = dim // side.codes.planes
                pieces = [
                    backend.load(source.at[sequence, token, head, plane * width + lanes(width)])
                    for plane in range(side.codes.planes)
                ]
                write(side, pieces, source.dtype, slot, head, interpret)

        # Of a prompt, some may be padding; a single token should not wait for whether it is.
        pl.when(slot.valid)(store) if tokens > 1 else store()

    for_each(batch * tokens, see)


class _FlushOperands(NamedTuple):
    """What the kernel reads; references, inside of it."""

    block_tables: Any  # [batch, pages per sequence]
    starts: Any  # [batch]
    counts: Any  # [batch]
    first_tokens: Any  # [batch]
    keys: Any  # [tokens, KV heads, head dim] or None
    values: Any


class _Cut(NamedTuple):
    """How a block's keys, or values, are cut into pieces that can be encoded apart."""

    rows: int  # tokens
    width: int  # channels of each plane
    across: int  # pieces side by side

    @classmethod
    def of(cls, side: Side, page_size: int, size: _Size) -> _Cut:
        """Tokens that share scales stay together, or else all channels of a token."""
        stored, planes = side.words.shape[3], side.codes.planes
        if side.codes.group is not None:
            width = max(width for width in range(1, size.width + 1) if stored % width == 0)
            return cls(side.codes.group, width, stored // width)
        most = max(1, size.elements // (stored * planes))
        return cls(min(1 << most.bit_length() - 1, page_size), stored, 1)

    def pieces(self, block: int) -> int:
        """Of a block."""
        return block // self.rows * self.across


def _flush_kernel(
    operands: _FlushOperands,
    before: KVPages,
    pages: KVPages,
    *,
    cuts: Sequence[_Cut],
    interpret: bool,
) -> None:
    residual = pages.residual
    assert residual is not None
    block, heads = residual.page_size, pages.keys.shape[1]
    capacity = operands.block_tables.shape[1] * pages.page_size
    sequences = operands.starts.shape[0]
    lane = jnp.arange(pl.next_power_of_2(sequences))
    mask = lane < sequences
    starts, counts = (
        backend.load(x.at[lane], mask=mask, other=0) for x in (operands.starts, operands.counts)
    )
    begins, ends = (
        residuals.begin(jnp.minimum(position, capacity), block)
        for position in (starts, starts + counts)
    )
    full = jnp.maximum(ends - begins, 0) // block  # of each sequence
    last = jnp.cumsum(full)
    pieces = [cut.pieces(block) for cut in cuts]

    def see(task: jax.Array) -> None:
        rest, piece = task // sum(pieces), task % sum(pieces)
        number, head = rest // heads, rest % heads
        sequence = (last <= number).astype(jnp.int32).sum()
        begin, start, before = (
            jnp.where(lane == sequence, x, 0).sum() for x in (begins, starts, last - full)
        )
        of_block = _Block(sequence, head, begin + (number - before) * block, start)
        for side, cut in enumerate(cuts):
            number = piece - sum(pieces[:side])

            @pl.when((number >= 0) & (number < pieces[side]))
            def _(side: int = side, cut: _Cut = cut, number: jax.Array = number) -> None:
                _encode(operands, pages, of_block, side, cut, number, interpret)

    for_each(full.sum() * heads * sum(pieces), see)


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
    interpret: bool,
) -> None:
    """A piece of a block's keys (side 0), or values (1)."""
    assert pages.residual is not None
    waiting = pages.residual.sides[side].words
    new = (operands.keys, operands.values)[side]
    first_row = piece // cut.across * cut.rows
    channels = Channels(piece % cut.across * cut.width, cut.width)
    row = first_row + jnp.arange(cut.rows)[:, None]
    is_new = block.begin + row >= block.start
    first_token = backend.load(operands.first_tokens.at[block.sequence])
    token = jnp.maximum(first_token + block.begin + row - block.start, 0)
    position = block.begin + first_row
    page = backend.load(operands.block_tables.at[block.sequence, position // pages.page_size])
    slot = Slot(page, position % pages.page_size, jnp.bool_(True))

    def load(plane: int) -> jax.Array:
        of_plane = plane * cut.width * cut.across
        channel = (of_plane + channels.first + lanes(cut.width))[None, :]
        x = backend.load(waiting.at[block.sequence, block.head, row, channel])
        if new is None:
            return x
        at = new.at[token, block.head, channel]
        return jnp.where(is_new, backend.load_masked(at, is_new).astype(x.dtype), x)

    target = pages.sides[side]
    planes = [load(plane) for plane in range(target.codes.planes)]
    write(target, planes, waiting.dtype, slot, block.head, interpret, channels)
