"""Both products of adapters as Triton kernels, which add to the base's product in place.

For few rows there is one kernel, in which each program repeats the first product: `down` is small,
and a second launch would take longer. For more rows there are two kernels. The channels of the
first product are divided among programs (split-K), whose sums the second product adds up. Rows with
the same adapter are a tile of a tensor-core product, for which a factor is loaded once. The
segments of such rows are the same for all maps of a step, and XLA computes them once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels import device
from mpjax.kernels.launch import Settings, first_program_id, launch, load, load_masked, store
from mpjax.kernels.target import current_target

FEW_ROWS = 8  # with more, programs that repeat the first product would read too much
MOST_REPEATED = 1 << 18  # elements of a map's `down` that each program reads
STEP_ROWS = 256  # with more, a program has adjacent rows, and processes their adapters in turn
ROWS, SLOTS = 16, 16  # rows of a segment; programs that share the segments
BLOCK_ROWS = 64  # adjacent rows of a program
LEAST = 16  # of each axis of a tensor-core product
CHANNELS, RANKS = 128, 64  # of a program's tiles, at most
CHANNELS_OF_ROW, OUTPUTS_OF_ROW = 1024, 256  # of tiles of the single kernel for few rows
MOST_PARTS, PROGRAMS = 32, 4  # parts of the channels; programs on each multiprocessor
MOST_STEPS, MOST_PROGRAMS = 8, 1024  # tiles of outputs in a program; programs with one tile
NO_MORE = 1 << 30  # above all numbers of adapters


class Segments(NamedTuple):
    """Segments of up to ROWS rows with the same adapter.

    adapters: int32 [segments]. rows: int32 [segments, ROWS], padded with the number of all rows.
    count: int32 [1], the number of segments.
    """

    adapters: Any
    rows: Any
    count: Any

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
        own = jnp.where(has_one, jnp.where(begun, segment[None, :], 0).sum(1), most)
        return cls(
            jnp.zeros(most, jnp.int32).at[own].set(adapters, mode="drop"),
            jnp.full((most, ROWS), rows, jnp.int32).at[own, place].set(number, mode="drop"),
            begins.sum(dtype=jnp.int32)[None],
        )


def repeats(x: jax.Array, down: jax.Array, ups: Sequence[jax.Array]) -> bool:
    """Whether `add` is faster than `shrink` and `expand`; arguments as theirs."""
    return len(x) <= FEW_ROWS and down.shape[1] * ups[0].shape[1] <= MOST_REPEATED


@functools.partial(jax.jit, static_argnames="interpret")
def add(
    terms: jax.Array,
    x: jax.Array,
    down: jax.Array,
    ups: Sequence[jax.Array],
    adapters: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Adds the adapters' product x · down · up to the base's product, in one kernel for few rows.

    terms: [splits, rows, N], the base's partial sums; the first is changed in place. Other
    arguments are as in `shrink` and `expand`.
    """
    tiles = sum(pl.cdiv(up.shape[2], OUTPUTS_OF_ROW) for up in ups)
    found: jax.Array = launch(
        _add,
        terms,
        (x, down, tuple(ups), adapters),
        out_shape=jax.ShapeDtypeStruct(terms.shape, terms.dtype),
        grid=(len(x), tiles),
        settings=Settings("adapter_add", warps=8),
        interpret=interpret,
        aliases={0: 0},
    )
    return found


@functools.partial(jax.jit, static_argnames="interpret")
def shrink(
    x: jax.Array, down: jax.Array, adapters: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """Terms float32 [parts, rows, maps · rank] of x [rows, K] and each row's first factors.

    down: [places, K, maps · rank]. adapters: int32 [rows], from 1; terms of rows with 0 are any
    numbers.
    """
    (rows, channels), (places, _, ranks) = x.shape, down.shape
    chosen, programs = _chosen(adapters, places)
    steps = pl.cdiv(channels, CHANNELS)
    parts = max(1, min(steps, MOST_PARTS, PROGRAMS * device.multiprocessors() // programs))
    tile = min(RANKS, max(LEAST, pl.next_power_of_2(ranks)))
    terms: jax.Array = launch(
        functools.partial(_shrink, tile=tile, steps=pl.cdiv(steps, parts)),
        (x, down, chosen),
        out_shape=jax.ShapeDtypeStruct((parts, rows, ranks), jnp.float32),
        grid=(programs, parts, pl.cdiv(ranks, tile)),
        settings=Settings("adapter_shrink", warps=4, stages=3),
        interpret=interpret,
    )
    # A prompt's terms would be read again for every tile of outputs.
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
    """Adds the second products to the first of the terms [splits, rows, N], in place.

    inner: float32 [parts, rows, maps · rank]. ups: of each map [places, rank, outputs].
    """
    chosen, programs = _chosen(adapters, len(ups[0]))
    is_step, steps = isinstance(chosen, Segments), 1
    size = 256 if is_step else 128
    while steps < MOST_STEPS and programs * sum(_tiles(ups, size * steps)) > MOST_PROGRAMS:
        steps *= 2
    found: jax.Array = launch(
        functools.partial(_expand, size=size, steps=steps),
        terms,
        (inner, tuple(ups), chosen),
        out_shape=jax.ShapeDtypeStruct(terms.shape, terms.dtype),
        grid=(programs, sum(_tiles(ups, size * steps))),
        settings=Settings("adapter_expand", warps=4 if is_step else 8),
        interpret=interpret,
        aliases={0: 0},
    )
    return found


def _chosen(adapters: jax.Array, places: int) -> tuple[Segments | jax.Array, int]:
    """The arrays by which a kernel's programs find their rows, and the number of programs."""
    if len(adapters) > STEP_ROWS:
        return adapters, pl.cdiv(len(adapters), BLOCK_ROWS)
    segments = Segments.of(adapters, places)
    return segments, min(SLOTS, len(segments.adapters))


def _tiles(ups: Sequence[Any], size: int) -> list[int]:
    """The number of programs for each map, with `size` outputs each."""
    return [pl.cdiv(up.shape[2], size) for up in ups]


def _add(terms_ref: Any, inputs: Any, found_ref: Any) -> None:
    x_ref, down_ref, up_refs, adapters_ref = inputs
    row, place = first_program_id(), pl.program_id(1)
    adapter = load(adapters_ref.at[row])
    first, before = 0, 0  # the map's first program, and its first output
    for number, tiles in enumerate(_tiles(up_refs, OUTPUTS_OF_ROW)):
        outputs = _Outputs(number, before, place - first, 1, OUTPUTS_OF_ROW)
        references = terms_ref, x_ref, down_ref, up_refs[number], found_ref
        is_mine = (place >= first) & (place < first + tiles) & (adapter > 0)
        pl.when(is_mine)(functools.partial(_add_row, references, outputs, adapter - 1, row))
        first, before = first + tiles, before + up_refs[number].shape[2]


def _add_row(references: Any, place: _Outputs, entry: jax.Array, row: jax.Array) -> None:
    """Adds some outputs of a map to a row, by an entry of the stacks."""
    terms_ref, x_ref, down_ref, up_ref, found_ref = references
    (_, ranks, outputs), channels = up_ref.shape, down_ref.shape[1]
    rank, output = jnp.arange(pl.next_power_of_2(ranks)), place.outputs(jnp.int32(0))
    is_rank = None if len(rank) == ranks else rank < ranks
    is_output = None if outputs % place.size == 0 else output < outputs
    mask = _both(_row(is_output), _column(is_rank))
    # Loaded first: they don't wait for the first product.
    up = load_masked(up_ref.at[entry, rank[:, None], output[None, :]], mask)
    target = jnp.int32(0), row, place.before + output
    base = load_masked(terms_ref.at[target], is_output).astype(jnp.float32)
    width = min(CHANNELS_OF_ROW, pl.next_power_of_2(channels))
    total = jnp.zeros((width, len(rank)), jnp.float32)
    for begin in range(0, channels, width):
        channel = begin + jnp.arange(width)
        is_inside = None if begin + width <= channels else channel < channels
        column = (place.number * ranks + rank)[None, :]
        factor = load_masked(
            down_ref.at[entry, channel[:, None], column], _both(_column(is_inside), _row(is_rank))
        )
        values = load_masked(x_ref.at[row, channel], is_inside).astype(jnp.float32)
        total += factor.astype(jnp.float32) * values[:, None]
    inner = total.sum(0).astype(up.dtype).astype(jnp.float32)
    sums = base + (inner[:, None] * up.astype(jnp.float32)).sum(0)
    store(found_ref.at[target], sums.astype(found_ref.dtype), mask=is_output)


def _shrink(inputs: Any, terms_ref: Any, *, tile: int, steps: int) -> None:
    x_ref, down_ref, chosen = inputs
    (rows, channels), ranks = x_ref.shape, down_ref.shape[2]
    program, part = first_program_id(), pl.program_id(1)
    rank = pl.program_id(2) * tile + jnp.arange(tile)
    is_rank = None if ranks % tile == 0 else rank < ranks
    count: Any = steps
    if channels % (CHANNELS * steps):
        count = jnp.clip(pl.cdiv(channels, CHANNELS) - part * steps, 0, steps)

    def multiply(adapter: jax.Array, row: jax.Array, has: jax.Array) -> None:
        def add(step: jax.Array, total: jax.Array) -> jax.Array:
            channel = (part * steps + step) * CHANNELS + jnp.arange(CHANNELS)
            is_inside = None if channels % CHANNELS == 0 else channel < channels
            mask = _both(_column(is_inside), _row(is_rank))
            factor = load_masked(down_ref.at[adapter - 1, channel[:, None], rank[None, :]], mask)
            wanted = _both(has[:, None], _row(is_inside))
            values = load_masked(x_ref.at[row[:, None], channel[None, :]], wanted)
            return total + current_target().dot(values, factor)

        total = jax.lax.fori_loop(0, count, add, jnp.zeros((len(row), tile), jnp.float32))
        place, mask = (
            terms_ref.at[part, row[:, None], rank[None, :]],
            _both(has[:, None], _row(is_rank)),
        )
        _store(place, total, mask)

    _for_adapters(chosen, program, rows, multiply)


def _expand(terms_ref: Any, inputs: Any, found_ref: Any, *, size: int, steps: int) -> None:
    inner_ref, up_refs, chosen = inputs
    program, place, rows = first_program_id(), pl.program_id(1), terms_ref.shape[1]
    first, before = 0, 0  # the map's first program, and its first output
    for number, tiles in enumerate(_tiles(up_refs, size * steps)):
        outputs = _Outputs(number, before, (place - first) * steps, steps, size)
        references = terms_ref, inner_ref, up_refs[number], found_ref
        expand_map = functools.partial(_expand_map, references, outputs)
        run = functools.partial(_for_adapters, chosen, program, rows, expand_map)
        if len(up_refs) == 1:
            run()
        else:
            pl.when((place >= first) & (place < first + tiles))(run)
        first, before = first + tiles, before + up_refs[number].shape[2]


class _Outputs(NamedTuple):
    """The outputs of a program: those of a map's tiles.

    number: of the map. before: the outputs of the maps before it. first: the first tile. steps: the
    number of tiles. size: outputs of a tile.
    """

    number: int
    before: int
    first: jax.Array
    steps: int
    size: int

    def outputs(self, step: jax.Array) -> jax.Array:
        """The map's outputs of a tile."""
        return (self.first + step) * self.size + jnp.arange(self.size)


def _expand_map(references: Any, place: _Outputs, *rows: jax.Array) -> None:
    """Adds some outputs of a map.

    references: to the terms, the first products, the map's factors, and the result. rows: the
    adapter's number, the rows, and whether each has the adapter.
    """
    (terms_ref, inner_ref, up_ref, found_ref), (adapter, row, has) = references, rows
    _, ranks, outputs = up_ref.shape
    rank = jnp.arange(max(LEAST, pl.next_power_of_2(ranks)))
    is_rank = None if len(rank) == ranks else rank < ranks
    wanted, column = _both(has[:, None], _row(is_rank)), (place.number * ranks + rank)[None, :]
    parts = range(inner_ref.shape[0])  # whose loads do not wait for each other
    loads = [
        load_masked(inner_ref.at[jnp.int32(part), row[:, None], column], wanted) for part in parts
    ]
    inner = functools.reduce(jnp.add, loads).astype(up_ref.dtype)

    def add(step: jax.Array, _: jax.Array) -> jax.Array:
        output = place.outputs(step)
        is_output = None if outputs % (place.size * place.steps) == 0 else output < outputs
        mask = _both(_row(is_output), _column(is_rank))
        factor = load_masked(up_ref.at[adapter - 1, rank[:, None], output[None, :]], mask)
        target = jnp.int32(0), row[:, None], (place.before + output)[None, :]
        kept = _both(has[:, None], _row(is_output))
        base = load_masked(terms_ref.at[target], kept).astype(jnp.float32)
        sums = base + current_target().dot(inner, factor)
        _store(found_ref.at[target], sums.astype(found_ref.dtype), kept)
        return step

    jax.lax.fori_loop(0, place.steps, add, jnp.int32(0))


def _for_adapters(
    chosen: Any,
    program: jax.Array,
    rows: int,
    multiply: Callable[[jax.Array, jax.Array, jax.Array], None],
) -> None:
    """Calls `multiply(adapter, row indices, mask of the rows)` for each adapter of a program.

    chosen: Segments, or the adapters of all rows. rows: their number.
    """
    if isinstance(chosen, Segments):
        slots = min(SLOTS, chosen.adapters.shape[0])
        count = load(chosen.count.at[jnp.int32(0)])

        def step(turn: jax.Array, last: jax.Array) -> jax.Array:
            segment = program + turn * slots
            row = load(chosen.rows.at[segment, jnp.arange(ROWS)])
            multiply(load(chosen.adapters.at[segment]), row, row < rows)
            return last

        jax.lax.fori_loop(0, pl.cdiv(count - program, slots), step, jnp.int32(0))
        return
    number = jnp.arange(BLOCK_ROWS)
    row = program * BLOCK_ROWS + number
    own = load_masked(chosen.at[row], None if rows % BLOCK_ROWS == 0 else row < rows)
    again = (own[:, None] == own[None, :]) & (number[None, :] < number[:, None])
    is_first = (own > 0) & (again.astype(jnp.int32).sum(1) == 0)

    def go_on(_: jax.Array, last: jax.Array) -> jax.Array:
        adapter = jnp.where(own > last, own, NO_MORE).min()
        multiply(adapter, row, own == adapter)
        return adapter

    jax.lax.fori_loop(0, is_first.astype(jnp.int32).sum(), go_on, jnp.int32(0))


def _both(left: jax.Array | None, right: jax.Array | None) -> jax.Array | None:
    if left is None or right is None:
        return right if left is None else left
    return left & right


def _row(mask: jax.Array | None) -> jax.Array | None:
    return None if mask is None else mask[None, :]


def _column(mask: jax.Array | None) -> jax.Array | None:
    return None if mask is None else mask[:, None]


def _store(ref: Any, tile: jax.Array, mask: jax.Array | None) -> None:
    store(ref, tile, mask=None if mask is None else jnp.broadcast_to(mask, tile.shape))
