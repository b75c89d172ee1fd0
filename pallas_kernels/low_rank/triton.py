"""Both products of adapters as Triton kernels, the second of which adds to the base's in place.

*Shrink* computes x · down, with the channels divided among programs (split-K). In a step
of few rows, a program has one row. In a larger step it has a segment: up to 16 rows with the same
adapter, for which a factor is loaded once. In prefill it has adjacent rows, and processes their
adapters in turn. The segments are the same for all maps of a step, and XLA computes them once.

*Expand* sums these parts, multiplies them by up and adds. In a step, a program has one row.
It waits for memory only, so it is one warp, and many programs are resident; rows with the same
adapter read its factor from the L2 cache. In prefill it has adjacent rows, as for shrink.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels import device
from mpjax.kernels.launch import Settings, first_program_id, launch, load, load_masked, store
from mpjax.kernels.target import current_target

FEW_ROWS = 8  # with more, a program of shrink has a segment
STEP_ROWS = 256  # with more, a program has adjacent rows
ROWS, BLOCK_ROWS = 16, 32  # rows of a segment; adjacent rows of a program
LEAST = 16  # of each axis of a tensor-core product
CHANNELS, RANKS = 128, 64  # of a program's tiles, at most
ELEMENTS = 8192  # of a tile of `down` without a tensor-core product, at most
PARTS = 32  # parts of the channels, at most
PROGRAMS, PROGRAMS_OF_PROMPT = 4, 2  # of shrink on each multiprocessor
OUTPUTS_OF_ROW, OUTPUTS = 256, 128  # of a program of expand: with one row, and with several
NO_MORE = 1 << 30  # above all numbers of adapters


class Segments(NamedTuple):
    """Segments of up to ROWS rows with the same adapter.

    adapters: int32 [segments], 0 for segments without rows. rows: int32 [segments, ROWS], padded
    with the number of all rows.
    """

    adapters: Any
    rows: Any

    @classmethod
    def of(cls, adapters: jax.Array, places: int) -> Segments:
        """The segments of rows with adapters int32 [rows], from 1 to `places`; 0 for none."""
        rows, number = len(adapters), jnp.arange(len(adapters), dtype=jnp.int32)
        most, has_one = min(rows, places + rows // ROWS), adapters > 0
        is_earlier = number[None, :] < number[:, None]
        same = (adapters[:, None] == adapters[None, :]) & has_one[None, :]
        earlier = (same & is_earlier).sum(1, dtype=jnp.int32)
        place = earlier % ROWS
        begins = has_one & (place == 0)
        # The index of the segment, in rows where one begins.
        segment = (begins[None, :] & is_earlier).sum(1, dtype=jnp.int32)
        begun = same & begins[None, :] & (earlier[None, :] == (earlier - place)[:, None])
        own = jnp.where(begun, segment[None, :], -1).max(1)
        is_own = own[None, :] == jnp.arange(most, dtype=jnp.int32)[:, None]  # [segments, rows]
        is_at = place[None, :] == jnp.arange(ROWS, dtype=jnp.int32)[:, None]  # [ROWS, rows]
        return cls(
            jnp.where(is_own, adapters[None, :], 0).max(1),
            jnp.where(is_own[:, None] & is_at[None], number[None, None, :], rows).min(2),
        )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["x", "down", "chosen"],
    meta_fields=["width", "steps", "tile"],
)
@dataclasses.dataclass(frozen=True)
class Shrink:
    """The first product: arrays outside of a kernel, references inside, and sizes.

    x: [rows, K]. down: [places, K, maps · rank]. chosen: the Segments, or the adapters of
    all rows. width: channels of a program's tile. steps: tiles of a program, one after the
    other. tile: ranks of a program.
    """

    x: Any
    down: Any
    chosen: Any
    width: int
    steps: int
    tile: int

    @classmethod
    def of(cls, x: jax.Array, down: jax.Array, adapters: jax.Array) -> Shrink:
        """The product for rows with adapters int32 [rows]."""
        (rows, channels), (places, _, ranks) = x.shape, down.shape
        is_step = FEW_ROWS < rows <= STEP_ROWS
        chosen = Segments.of(adapters, places) if is_step else adapters
        programs = programs_of(chosen, FEW_ROWS)
        tile = min(RANKS, max(LEAST, pl.next_power_of_2(ranks)))
        if rows <= FEW_ROWS:  # one tile: without a tensor-core product, no loads are pipelined
            width = max(CHANNELS, pl.next_power_of_2(pl.cdiv(channels, PARTS)))
            return cls(x, down, chosen, min(width, ELEMENTS // tile), 1, tile)
        wanted = (
            device.multiprocessors()
            * (PROGRAMS_OF_PROMPT if rows > STEP_ROWS else PROGRAMS)
            // programs
        )
        tiles = pl.cdiv(channels, CHANNELS)
        steps = pl.cdiv(tiles, max(1, min(tiles, PARTS, wanted)))
        return cls(x, down, chosen, CHANNELS, steps, tile)

    @property
    def grid(self) -> tuple[int, int, int]:
        """The numbers of programs for different rows, parts of the channels, and tiles of ranks."""
        parts = pl.cdiv(self.x.shape[1], self.width * self.steps)
        return programs_of(self.chosen, FEW_ROWS), parts, pl.cdiv(self.down.shape[2], self.tile)

    @property
    def result(self) -> jax.ShapeDtypeStruct:
        """Terms float32 [parts, rows, maps · rank]; of rows without an adapter, any numbers."""
        shape = self.grid[1], len(self.x), self.down.shape[2]
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def run(self, terms_ref: Any, program: jax.Array, part: jax.Array, of_ranks: jax.Array) -> None:
        """In a kernel, computes and stores the terms of the program at these places in `grid`."""
        (rows, channels), ranks = self.x.shape, self.down.shape[2]
        rank = of_ranks * self.tile + jnp.arange(self.tile)
        is_rank = None if ranks % self.tile == 0 else rank < ranks
        count: Any = self.steps
        if channels % (self.width * self.steps) and self.steps > 1:
            count = jnp.clip(pl.cdiv(channels, self.width) - part * self.steps, 0, self.steps)

        def multiply(adapter: jax.Array, row: jax.Array, has: jax.Array | None) -> None:
            def add(step: jax.Array, total: jax.Array) -> jax.Array:
                channel = (part * self.steps + step) * self.width + jnp.arange(self.width)
                is_inside = None if channels % self.width == 0 else channel < channels
                mask = _both(_column(is_inside), _row(is_rank))
                factor = self.down.at[adapter - 1, channel[:, None], rank[None, :]]
                values = self.x.at[_place(row, channel)]
                values = load_masked(values, _tile_mask(has, is_inside))
                return total + _product(values, load_masked(factor, mask))

            total = jnp.zeros((*row.shape, self.tile), jnp.float32)
            if self.steps == 1:
                total = add(jnp.int32(0), total)
            else:
                total = jax.lax.fori_loop(0, count, add, total)
            store_tile(terms_ref.at[(part, *_place(row, rank))], total, _tile_mask(has, is_rank))

        for_adapters(self.chosen, program, rows, multiply, most=FEW_ROWS)

    def run_beside(self, terms_ref: Any, number: jax.Array) -> None:
        """As `run` for the program with this number, in a launch with other programs."""
        _, parts, tiles = self.grid
        program, rest = number // (parts * tiles), number % (parts * tiles)
        self.run(terms_ref, program, rest // tiles, rest % tiles)


@functools.partial(jax.jit, static_argnames="interpret")
def shrink(
    x: jax.Array, down: jax.Array, adapters: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """Terms float32 [parts, rows, maps · rank] of x [rows, K] and each row's first factors.

    down: [places, K, maps · rank]. adapters: int32 [rows], from 1; terms of rows with 0 are any
    numbers.
    """
    operands = Shrink.of(x, down, adapters)
    terms: jax.Array = launch(
        lambda operands, terms_ref: operands.run(
            terms_ref, first_program_id(), pl.program_id(1), pl.program_id(2)
        ),
        operands,
        out_shape=operands.result,
        grid=operands.grid,
        settings=Settings("adapter_shrink", warps=4, stages=3),
        interpret=interpret,
    )
    # A prompt's terms would be read again for every tile of outputs.
    return terms.sum(0, keepdims=True) if len(x) > STEP_ROWS else terms


@functools.partial(jax.jit, static_argnames="interpret")
def expand(
    terms: jax.Array,
    inner: jax.Array,
    ups: Sequence[jax.Array],
    adapters: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Adds the second products to the first of the terms [splits, rows, N], in place.

    inner: float32 [parts, rows, maps · rank]. ups: of each map [places, rank, outputs].
    """
    rows = len(adapters)
    is_row = rows <= STEP_ROWS
    size = OUTPUTS_OF_ROW if is_row else OUTPUTS
    found: jax.Array = launch(
        functools.partial(_expand, size=size),
        terms,
        (inner, tuple(ups), adapters),
        out_shape=jax.ShapeDtypeStruct(terms.shape, terms.dtype),
        grid=(
            sum(_tiles(ups, size)),
            programs_of(adapters, STEP_ROWS),
        ),  # a prompt's tiles of one row are adjacent
        settings=Settings("adapter_expand", warps=1 if is_row else 4),
        interpret=interpret,
        aliases={0: 0},
    )
    return found


def programs_of(chosen: Any, most: int) -> int:
    """The number of programs for different rows. most: up to it, each program has one row."""
    if isinstance(chosen, Segments):
        return int(chosen.adapters.shape[0])
    rows = int(chosen.shape[0])
    return rows if rows <= most else pl.cdiv(rows, BLOCK_ROWS)


def _tiles(ups: Sequence[Any], size: int) -> list[int]:
    """The number of programs for each map, with `size` outputs each."""
    return [pl.cdiv(up.shape[2], size) for up in ups]


def _expand(terms_ref: Any, inputs: Any, found_ref: Any, *, size: int) -> None:
    inner_ref, up_refs, chosen = inputs
    place, program, rows = first_program_id(), pl.program_id(1), terms_ref.shape[1]
    first, before = 0, 0  # the map's first program, and its first output
    for number, (tiles, up_ref) in enumerate(zip(_tiles(up_refs, size), up_refs, strict=True)):
        output = (place - first) * size + jnp.arange(size)
        factors = Factors(inner_ref, up_ref, number, before, output)
        expand_map = functools.partial(_expand_map, terms_ref, factors, found_ref)
        run = functools.partial(for_adapters, chosen, program, rows, expand_map, most=STEP_ROWS)
        if len(up_refs) == 1:
            run()
        else:
            pl.when((place >= first) & (place < first + tiles))(run)
        first, before = first + tiles, before + up_ref.shape[2]


def _expand_map(
    terms_ref: Any,
    factors: Factors,
    found_ref: Any,
    adapter: jax.Array,
    row: jax.Array,
    has: jax.Array | None,
) -> None:
    """Adds some outputs of a map. adapter, row, has: as of `for_adapters`."""
    target, kept = factors.target(row, has)
    target = (jnp.int32(0), *target)
    base = load_masked(terms_ref.at[target], kept).astype(jnp.float32)
    sums = base + factors.product(factors.load(adapter, row, has), row)
    store_tile(found_ref.at[target], sums.astype(found_ref.dtype), kept)


class Factors(NamedTuple):
    """In a kernel, the two factors of some outputs of a map's change.

    inner: the first products [parts, rows, maps · rank], of a prompt in one part. up: the map's
    factors [places, rank, outputs]. number: of the map. before: the number of outputs of the maps
    before it. output: the map's outputs in a tile. all_rows: whether rows without an adapter are
    processed, too, with a change of zeros. Methods get a program's rows as `for_adapters` passes
    them.
    """

    inner: Any
    up: Any
    number: int
    before: int
    output: jax.Array
    all_rows: bool = False

    @property
    def is_output(self) -> jax.Array | None:
        """Which of a tile's outputs the map has; None for all."""
        outputs = self.up.shape[2]
        return None if outputs % len(self.output) == 0 else self.output < outputs

    def target(self, row: jax.Array, has: jax.Array | None) -> tuple[Any, Any]:
        """The indices of the outputs, rows first, and their mask."""
        return _place(row, self.before + self.output), _tile_mask(has, self.is_output)

    def load(
        self, adapter: jax.Array, row: jax.Array, has: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """The first products [rows, rank], or of one row their terms [parts, rank], and `up`."""
        rank, is_rank = self._ranks(adapter)
        mask = _both(_row(self.is_output), _column(is_rank))
        up = load_masked(self.up.at[adapter - 1, rank[:, None], self.output[None, :]], mask)
        column = self.number * self.up.shape[1] + rank
        if row.ndim:
            place = self.inner.at[(jnp.int32(0), *_place(row, column))]
            return load_masked(place, _tile_mask(has, is_rank)), up
        parts = self.inner.shape[0]
        part = jnp.arange(pl.next_power_of_2(parts))
        is_part = None if len(part) == parts else part < parts
        place = self.inner.at[part[:, None], row, column[None, :]]
        return load_masked(place, _both(_column(is_part), _row(is_rank))), up

    def product(self, loaded: tuple[jax.Array, jax.Array], row: jax.Array) -> jax.Array:
        """The change of a tile in float32, of the result of `load`."""
        inner, up = loaded
        if row.ndim == 0:
            inner = inner.sum(0)
        return _product(inner.astype(up.dtype), up)

    def _ranks(self, adapter: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The ranks of a tile, and which of them count; None for all."""
        ranks = self.up.shape[1]
        rank = jnp.arange(max(LEAST, pl.next_power_of_2(ranks)))
        is_rank = None if len(rank) == ranks else rank < ranks
        if self.all_rows:
            is_rank = _both(is_rank, jnp.broadcast_to(adapter > 0, rank.shape))
        return rank, is_rank


def for_adapters(
    chosen: Any,
    program: jax.Array,
    rows: int,
    multiply: Callable[[jax.Array, jax.Array, jax.Array | None], None],
    *,
    most: int,
    first: int = 1,
) -> None:
    """Calls `multiply(adapter, row indices, mask of the rows)` for each adapter of a program.

    chosen: Segments, or the adapters of all rows. rows: their number. most: up to this number, a
    program has one row, which `multiply` gets as a scalar, without a mask. first: 0 to call it also
    for rows without an adapter, else 1.
    """
    if isinstance(chosen, Segments):
        adapter = load(chosen.adapters.at[program])
        row = load(chosen.rows.at[program, jnp.arange(ROWS)])
        pl.when(adapter > 0)(lambda: multiply(adapter, row, row < rows))
        return
    if rows <= most:
        adapter = load(chosen.at[program])
        pl.when(adapter >= first)(lambda: multiply(adapter, program, None))
        return
    row = program * BLOCK_ROWS + jnp.arange(BLOCK_ROWS)
    own = load(chosen.at[row]) if rows % BLOCK_ROWS == 0 else _own(chosen, row, rows)

    def after(last: jax.Array) -> jax.Array:
        return jnp.where(own > last, own, NO_MORE).min()

    def go_on(adapter: jax.Array) -> jax.Array:
        multiply(adapter, row, own == adapter)
        return after(adapter)

    jax.lax.while_loop(lambda adapter: adapter < NO_MORE, go_on, after(jnp.int32(first - 1)))


def _own(adapters: Any, row: jax.Array, rows: int) -> jax.Array:
    """The adapters of a block's rows; −1 beyond the last row."""
    is_row = row < rows
    return jnp.where(is_row, load_masked(adapters.at[row], is_row), -1)


def _product(values: jax.Array, factor: jax.Array) -> jax.Array:
    """The product [rows, N] or [N] of values [rows, K] or [K] and a factor [K, N], in float32."""
    if values.ndim == 2:
        return current_target().dot(values, factor)
    return (values.astype(jnp.float32)[:, None] * factor.astype(jnp.float32)).sum(0)


def _place(row: jax.Array, column: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The indices of a tile of rows, or of a tile of one row."""
    return (row[:, None], column[None, :]) if row.ndim else (row, column)


def _tile_mask(has: jax.Array | None, is_inside: jax.Array | None) -> jax.Array | None:
    """The mask of a tile of rows, some of which the program has, or of a tile of one row."""
    return is_inside if has is None else _both(has[:, None], _row(is_inside))


def _both(left: jax.Array | None, right: jax.Array | None) -> jax.Array | None:
    if left is None or right is None:
        return right if left is None else left
    return left & right


def _row(mask: jax.Array | None) -> jax.Array | None:
    return None if mask is None else mask[None, :]


def _column(mask: jax.Array | None) -> jax.Array | None:
    return None if mask is None else mask[:, None]


def store_tile(ref: Any, tile: jax.Array, mask: jax.Array | None) -> None:
    """Stores a tile. mask: as `tile`, or broadcastable to it; None for all."""
    store(ref, tile, mask=None if mask is None else jnp.broadcast_to(mask, tile.shape))
