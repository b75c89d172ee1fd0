"""Both products of adapters as Triton kernels; the second adds to the base's product in place.

Programs divide the rows of a block by adapter: rows with the same adapter are a tile of a
tensor-core product, for which a factor is loaded once. A program without rows ends immediately. Few
rows are blocks of one row, whose products are computed without tensor cores. The channels of the
first product are divided among programs (split-K), whose sums the second product adds up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels import device
from mpjax.kernels.launch import Settings, first_program_id, launch, load_masked, store
from mpjax.kernels.target import current_target

FEW_ROWS = 8  # with more, rows that share an adapter are multiplied together
STEP_ROWS = 256  # with more, one program processes a block's adapters in turn
MOST_ROWS = 64  # of a block
LEAST = 16  # of each axis of a tensor-core product
CHANNELS, RANKS, OUTPUTS = 128, 64, 256  # of a program's tiles, at most
MOST_PARTS, PROGRAMS = 32, 4  # parts of the channels; programs on each multiprocessor
NO_MORE = 1 << 30  # above all numbers of adapters


class Blocks(NamedTuple):
    """The division of rows among programs.

    rows: of a block, a power of two. tile: rows that are multiplied together. classes: programs of
    a block; each adapter belongs to one of them.
    """

    rows: int
    tile: int
    classes: int

    @classmethod
    def of(cls, rows: int, places: int) -> Blocks:
        """The blocks for `rows` rows that choose from `places` adapters."""
        if rows <= FEW_ROWS:
            return cls(1, 1, 1)
        if rows > STEP_ROWS:
            return cls(MOST_ROWS, MOST_ROWS, 1)
        block = min(MOST_ROWS, pl.next_power_of_2(rows))
        return cls(block, LEAST, min(block, places))

    def programs(self, rows: int) -> int:
        """The number of programs for `rows` rows."""
        return pl.cdiv(rows, self.rows) * self.classes


@functools.partial(jax.jit, static_argnames="interpret")
def shrink(
    x: jax.Array, down: jax.Array, adapters: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """Terms float32 [parts, rows, maps · rank] of x [rows, K] and each row's `down`.

    down: [places, K, maps · rank]. adapters: int32 [rows], from 1; terms of rows with 0 are
    undefined.
    """
    (rows, channels), (places, _, ranks) = x.shape, down.shape
    blocks = Blocks.of(rows, places)
    steps, programs = pl.cdiv(channels, CHANNELS), blocks.programs(rows)
    share = PROGRAMS * device.multiprocessors() // programs
    parts = max(1, min(steps, MOST_PARTS, share))
    steps, width = pl.cdiv(steps, parts), CHANNELS
    if blocks.tile == 1:  # without tensor cores, the loads of a loop are not pipelined
        steps, width = 1, CHANNELS * pl.next_power_of_2(steps)
        parts = pl.cdiv(channels, width)
    tile = min(RANKS, max(LEAST, pl.next_power_of_2(ranks)))
    terms: jax.Array = launch(
        functools.partial(_shrink, blocks=blocks, tile=tile, width=width, steps=steps),
        (x, down, adapters),
        out_shape=jax.ShapeDtypeStruct((parts, rows, ranks), jnp.float32),
        grid=(programs, parts, pl.cdiv(ranks, tile)),
        settings=Settings("adapter_shrink", warps=4, stages=3),
        interpret=interpret,
    )
    # For a prompt, the next kernel would load all terms again for every tile of outputs.
    return terms.sum(0, keepdims=True) if rows > STEP_ROWS else terms


@functools.partial(jax.jit, static_argnames="interpret")
def expand(
    terms: jax.Array,
    inner: jax.Array,
    ups: Sequence[jax.Array],
    adapters: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Adds the products with `ups` to the first of the terms [splits, rows, N], in place.

    inner: float32 [parts, rows, maps · rank]. ups: for each map [places, rank, outputs].
    """
    rows, blocks = terms.shape[1], Blocks.of(terms.shape[1], len(ups[0]))
    tiles = [pl.cdiv(up.shape[2], OUTPUTS) for up in ups]
    found: jax.Array = launch(
        functools.partial(_expand, blocks=blocks),
        terms,
        (inner, tuple(ups), adapters),
        out_shape=jax.ShapeDtypeStruct(terms.shape, terms.dtype),
        grid=(blocks.programs(rows), sum(tiles)),
        settings=Settings("adapter_expand", warps=8 if blocks.tile == MOST_ROWS else 4),
        interpret=interpret,
        aliases={0: 0},
    )
    return found


def _shrink(
    inputs: Any, terms_ref: Any, *, blocks: Blocks, tile: int, width: int, steps: int
) -> None:
    x_ref, down_ref, adapters_ref = inputs
    (_, channels), ranks = x_ref.shape, down_ref.shape[2]
    program, part = _Program(adapters_ref, blocks, down_ref.shape[0]), pl.program_id(1)
    rank = pl.program_id(2) * tile + jnp.arange(tile)
    is_rank = None if ranks % tile == 0 else (rank < ranks)[None, :]
    count: Any = steps
    if channels % (width * steps):
        count = jnp.clip(pl.cdiv(channels, width) - part * steps, 0, steps)

    def multiply(adapter: jax.Array, row: jax.Array, has: jax.Array) -> None:
        def add(step: jax.Array, total: jax.Array) -> jax.Array:
            channel = (part * steps + step) * width + jnp.arange(width)
            is_inside = None if channels % width == 0 else channel < channels
            mask = _both(is_rank, None if is_inside is None else is_inside[:, None])
            factor = load_masked(down_ref.at[adapter - 1, channel[:, None], rank[None, :]], mask)
            wanted = _both(has[:, None], None if is_inside is None else is_inside[None, :])
            return total + _dot(
                load_masked(x_ref.at[row[:, None], channel[None, :]], wanted), factor
            )

        total = jax.lax.fori_loop(0, count, add, jnp.zeros((blocks.tile, tile), jnp.float32))
        _store(terms_ref.at[part, row[:, None], rank[None, :]], total, _both(has[:, None], is_rank))

    program.for_adapters(multiply)


def _expand(terms_ref: Any, inputs: Any, found_ref: Any, *, blocks: Blocks) -> None:
    inner_ref, up_refs, adapters_ref = inputs
    program, place = _Program(adapters_ref, blocks, up_refs[0].shape[0]), pl.program_id(1)
    tile, before = 0, 0  # of the first map, and its first output
    for number, up_ref in enumerate(up_refs):
        tiles = pl.cdiv(up_ref.shape[2], OUTPUTS)
        expand_map = functools.partial(
            _expand_map, terms_ref, inner_ref, found_ref, up_ref, (number, place - tile, before)
        )
        if len(up_refs) == 1:
            program.for_adapters(expand_map)
        else:
            pl.when((place >= tile) & (place < tile + tiles))(
                functools.partial(program.for_adapters, expand_map)
            )
        tile, before = tile + tiles, before + up_ref.shape[2]


def _expand_map(
    terms_ref: Any,
    inner_ref: Any,
    found_ref: Any,
    up_ref: Any,
    place: tuple[int, jax.Array, int],
    *rows: jax.Array,
) -> None:
    """Adds one map's products of a tile.

    place: the map's index, the tile's index among its tiles, and the map's first output in N.
    rows: the adapter, the rows' indices, and whether each row has the adapter.
    """
    (number, tile, before), (adapter, row, has) = place, rows
    _, ranks, outputs = up_ref.shape
    size = max(LEAST, pl.next_power_of_2(ranks))
    rank, output = jnp.arange(size), tile * OUTPUTS + jnp.arange(OUTPUTS)
    is_rank = None if size == ranks else rank < ranks
    is_output = None if outputs % OUTPUTS == 0 else (output < outputs)[None, :]
    mask = _both(is_output, None if is_rank is None else is_rank[:, None])
    factor = load_masked(up_ref.at[adapter - 1, rank[:, None], output[None, :]], mask)
    target, kept = (row[:, None], (before + output)[None, :]), _both(has[:, None], is_output)
    base = load_masked(terms_ref.at[jnp.int32(0), *target], kept)
    wanted = _both(has[:, None], None if is_rank is None else is_rank[None, :])

    column = (number * ranks + rank)[None, :]
    parts = range(inner_ref.shape[0])  # unrolled, so that loads don't wait for each other
    loads = [
        load_masked(inner_ref.at[jnp.int32(part), row[:, None], column], wanted) for part in parts
    ]
    inner = functools.reduce(jnp.add, loads)
    sums = base.astype(jnp.float32) + _dot(inner.astype(factor.dtype), factor)
    _store(found_ref.at[jnp.int32(0), *target], sums.astype(found_ref.dtype), kept)


class _Program:
    """In a kernel, the rows of a program's block whose adapters belong to the program.

    places: the number of adapters from which rows choose.
    """

    def __init__(self, adapters_ref: Any, blocks: Blocks, places: int) -> None:
        self.blocks, program = blocks, first_program_id()
        self.number = jnp.arange(blocks.rows)
        self.first = program // blocks.classes * blocks.rows
        row, rows = self.first + self.number, adapters_ref.shape[0]
        self.nowhere = rows  # index for lanes without a row
        own = load_masked(adapters_ref.at[row], None if rows % blocks.rows == 0 else row < rows)
        if blocks.classes > 1:
            is_mine = jax.lax.rem(own - 1, blocks.classes) == jax.lax.rem(program, blocks.classes)
            own = jnp.where((own > 0) & is_mine, own, 0)
        self.own = own
        self.has_one = blocks.rows == 1 or blocks.classes >= places  # adapter at most

    def for_adapters(self, multiply: Callable[[jax.Array, jax.Array, jax.Array], None]) -> None:
        """Calls `multiply` for each adapter: with the adapter, rows, and whether each has it."""

        def step(_: jax.Array, last: jax.Array) -> jax.Array:
            adapter = jnp.where(self.own > last, self.own, NO_MORE).min()
            has = self.own == adapter
            if self.blocks.tile == self.blocks.rows:
                multiply(adapter, self.first + self.number, has)
                return adapter
            behind = jnp.cumsum(has.astype(jnp.int32))  # for each row, the number of rows up to it
            count = has.astype(jnp.int32).sum()

            def step_of_rows(part: jax.Array, _: jax.Array) -> jax.Array:
                wanted = part * self.blocks.tile + jnp.arange(self.blocks.tile)
                is_it = (behind[None, :] == wanted[:, None] + 1) & has[None, :]
                row = self.first + jnp.where(is_it, self.number[None, :], 0).sum(1)
                has_row = wanted < count
                multiply(adapter, jnp.where(has_row, row, self.nowhere), has_row)
                return part

            jax.lax.fori_loop(0, pl.cdiv(count, self.blocks.tile), step_of_rows, jnp.int32(0))
            return adapter

        jax.lax.fori_loop(0, self._count(), step, jnp.int32(0))

    def _count(self) -> jax.Array:
        """The number of different adapters of the rows."""
        is_first = self.own > 0
        if self.has_one:
            return is_first.astype(jnp.int32).max()
        is_same = self.own[:, None] == self.own[None, :]
        again = is_same & (self.number[None, :] < self.number[:, None])
        is_first &= again.astype(jnp.int32).sum(1) == 0
        return is_first.astype(jnp.int32).sum()


def _dot(left: jax.Array, right: jax.Array) -> jax.Array:
    """The float32 product of tiles [rows, K] and [K, N]; without tensor cores for one row."""
    if left.shape[0] > 1:
        return current_target().dot(left, right)
    wide = left.astype(jnp.float32).reshape(-1, 1) * right.astype(jnp.float32)
    return wide.sum(0)[None, :]


def _both(left: jax.Array | None, right: jax.Array | None) -> jax.Array | None:
    if left is None or right is None:
        return right if left is None else left
    return left & right


def _store(ref: Any, tile: jax.Array, mask: jax.Array | None) -> None:
    store(ref, tile, mask=None if mask is None else jnp.broadcast_to(mask, tile.shape))
