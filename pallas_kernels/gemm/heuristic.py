"""The rule of thumb: how to multiply any shape in any format, without having measured it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Literal, NamedTuple

from mpjax.kernels import codes as code_kinds
from mpjax.kernels import device
from mpjax.kernels.device import Limits
from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.gemm.config import FEW_ROWS, ROWS, GemmConfig, Plan
from mpjax.kernels.gemm.limits import (
    can_scale_weights,
    why_not_fused,
    why_not_warpgroups,
    why_unsound,
    widths,
)
from mpjax.kernels.gemm.warpgroups import warpgroup_config


class Tile(NamedTuple):
    """Rows and output channels that a program multiplies, and its warps."""

    rows: int
    outputs: int
    warps: int


# Without warpgroups, up to so many rows Triton's kernel is the faster one, measured on the H200 at
# K4096 N24576. To write the weight out in 16 bits for cuBLAS takes 67 µs there, which is the price
# of decoding it again for every tile of rows; looking values up is dearer than computing them.
# XLA's FP8 product beats what Triton makes of FP8, which it multiplies in 16 bits; its int8 product
# never beats the fused one, as its sums cross memory. The int8 of two levels takes 42 µs to write
# out: of 4096 rows the product takes 664 µs instead of 803; of 2048, 356 instead of 370, but 194
# instead of 186 at K12288 N4096.
FUSED_ROWS, FUSED_ROWS_OF_TABLES, FUSED_ROWS_OF_FLOAT8 = 256, 128, 32
FUSED_ROWS_OF_LEVELS = 2048
# To so many, warpgroups are the fastest where they can multiply, measured on the H200 at K4096
# N24576: of 4096 rows uint8:g128 takes 1041 µs, and 1065 with cuBLAS and a copy, but 2062 and 2045
# of 8192. uint4 stays ahead (2004 and 2029, 1004 and 1053 at K12288 N4096; 16384 rows of K8192
# N10240: 3679 and 3706), but in groups of 32 (2091 and 2066). Of up to FEW_ROWS, it is tables and
# codes of four bits, and only where Pallas need not copy x; of fewer than ROWS, tables alone: a
# model adds the splits of Triton's product where it is read, and decodes one sequence in 2159 µs a
# token instead of 2183, though alone a product takes up to 14 % longer.
WARPGROUP_ROWS = 4096
# Of 4096 rows, tables of four and three bits take 1081 and 1053 µs at K4096 N24576, and 1064 and
# 1061 with cuBLAS and a copy: there is nothing left to gain.
WARPGROUP_ROWS_OF_TABLES = 2048
# For more and more rows, measured on the H200.
TILES = tuple(Tile(rows, 64, 4) for rows in (8, 16, 32, 64, 128))
WIDE_TILE = Tile(64, 128, 4)  # where a table in shared memory leaves registers for it
# For many rows: it reads each operand least often, and decodes a weight for the most rows, but
# wants tiles for most multiprocessors.
LARGEST_TILE = Tile(128, 128, 8)
LARGEST_TILES = {"int8": Tile(128, 128, 4), "liquid4": Tile(256, 64, 4)}
# LARGEST_TILE has twice the outputs of a tile for fewer rows, and steps that take so much longer;
# where there are fewer steps, the time of the first loads and of the partial sums is what counts.
LONGER_STEPS, FEW_STEPS = 1.6, 12
# Programs that keep the memory pipeline of a multiprocessor full, by a tile's rows. Where one has
# more to multiply it needs less company, and the partial sums of a split are dearer.
PROGRAMS_PER_MULTIPROCESSOR = {8: 4, 16: 4, 32: 3, 64: 2, 128: 1, 256: 1}
# Where more share one than this, two warps do for each.
PROGRAMS_OF_FOUR_WARPS = 3
# In steps of LARGEST_TILE, of which a multiprocessor runs one at a time: what a program takes to
# begin, and what one tile's partial sum costs, which is written and read back.
BEGINNING, PARTIAL_SUM = 1, 0.03
# Where one multiprocessor has so much more to do than the mean, smaller programs are spread better.
UNEVEN = 1.2
# Each split adds a partial sum to write and read back, and pays for a pipeline of its own.
BLOCKS_PER_SPLIT = 4
MAXIMUM_SPLITS = 8


@dataclasses.dataclass(frozen=True)
class _Product:
    """X [rows, channels] · W [channels, outputs] on a GPU."""

    rows: int
    format: WeightFormat
    channels: int
    outputs: int
    limits: Limits

    @property
    def has_table(self) -> bool:
        return code_kinds.of(self.format).has_table

    @property
    def is_dear(self) -> bool:
        """Whether weights cost so much to decode that it should not be done often."""
        return self.format.bits <= 4 and self.format.activations is None

    @property
    def largest_tile(self) -> Tile:
        return LARGEST_TILES.get(self.format.codes, LARGEST_TILE)

    @property
    def blocks(self) -> int:
        """Steps of K."""
        return -(-self.channels // self.format.block)

    def tiles(self, tile: Tile) -> int:
        return -(-self.rows // tile.rows) * -(-self.outputs // tile.outputs)

    def rounds(self, programs: int) -> int:
        """Programs of the busiest multiprocessor."""
        return -(-programs // self.limits.multiprocessors)


def heuristic(
    rows: int,
    format: WeightFormat,
    channels: int,
    outputs: int,
    limits: Limits,
    *,
    warpgroups: bool = True,
) -> Plan:
    """A sound plan for any shape and format; without `warpgroups`, not one of theirs."""
    other = unfused(format, limits)
    if warpgroups and _suits_warpgroups(rows, format, outputs, limits):
        return Plan("mosaic", warpgroup_config(rows, format, channels, outputs, limits))
    if why_not_fused(format, limits) or rows > _most_fused_rows(format):
        return Plan(other)
    return Plan("triton", fused_config(rows, format, channels, outputs, limits))


def _suits_warpgroups(rows: int, format: WeightFormat, outputs: int, limits: Limits) -> bool:
    if why_not_warpgroups(format, outputs, limits) is not None:
        return False
    has_table = code_kinds.of(format).has_table
    if rows < ROWS:
        return has_table
    if rows <= FEW_ROWS:
        return (has_table or format.codes == "uint4") and rows % ROWS == 0
    if format.activations or (format.codes == "uint4" and format.group_size != 32):
        return True
    return rows <= (WARPGROUP_ROWS_OF_TABLES if has_table else WARPGROUP_ROWS)


def unfused(format: WeightFormat, limits: Limits) -> Literal["dequantize", "xla"]:
    """The implementation for many rows.

    XLA's own product takes operands of 8 bits whose scales are constant along K.
    """
    if format.is_flat and format.group_size is None and why_not_fused(format, limits) is None:
        return "xla"
    return "dequantize"


def _most_fused_rows(format: WeightFormat) -> float:
    if format.activations == "int8":
        return math.inf if format.is_flat else FUSED_ROWS_OF_LEVELS
    if format.activations == "float8" and format.group_size is None:
        return FUSED_ROWS_OF_FLOAT8
    return FUSED_ROWS_OF_TABLES if code_kinds.of(format).has_table else FUSED_ROWS


def fused_config(
    rows: int, format: WeightFormat, channels: int, outputs: int, limits: Limits
) -> GemmConfig:
    """A sound configuration of Triton's kernel for any shape and format.

    Raises UnsupportedError, with the reason, where the GPU can't multiply the format at all.
    """
    product = _Product(rows, format, channels, outputs, limits)
    # Where shared memory does not hold it all, less of a large tile is still better than a smaller
    # one.
    for tile, stages, width in itertools.product(
        _tiles(product), _stages(product), _widths(product)
    ):
        splits, unsplit, _ = _divide(product, tile)
        scaling = _scaling(product, tile)
        config = GemmConfig(
            tile.rows, tile.outputs, splits, tile.warps, stages, scaling, width, unsplit
        )
        if (reason := why_unsound(config, format, limits)) is None:
            return config
    raise device.UnsupportedError(f"the fused kernel can't multiply {format}: {reason}")


def _tiles(product: _Product) -> list[Tile]:
    """The best tile, and smaller ones for where it does not fit."""
    rows, limits, largest = product.rows, product.limits, product.largest_tile
    size = next((size for size in range(4) if rows <= TILES[size].rows), 4)
    tiles = list(reversed(TILES[: size + 1]))
    if rows <= 16 and not product.has_table:
        splits = _divide(product, tiles[0]).splits
        programs = splits * product.tiles(tiles[0])
        many = splits > 1 and programs > PROGRAMS_OF_FOUR_WARPS * limits.multiprocessors
        if many or product.rounds(programs) * limits.multiprocessors > UNEVEN * programs:
            tiles = [tile._replace(warps=tile.warps // 2) for tile in tiles]
    # What is cheap to decode can be decoded more often, in smaller tiles that fill the GPU better.
    fills = 3 * product.tiles(largest) >= 2 * limits.multiprocessors
    if rows > (128 if product.is_dear else 256) and fills:
        tiles.insert(0, largest)
    elif rows > 64 and product.is_dear and not product.has_table:
        longer, shorter = _divide(product, largest).steps, _divide(product, tiles[0]).steps
        if FEW_STEPS <= longer <= shorter / LONGER_STEPS:
            tiles.insert(0, largest)
    if 64 < rows <= 128 and code_kinds.of(product.format).shared_bytes:
        tiles.insert(0, WIDE_TILE)
    return tiles


def _stages(product: _Product) -> tuple[int, ...]:
    """Steps of K in flight, the best number first."""
    rows, format = product.rows, product.format
    if product.has_table and (rows > 16 if format.bits == 4 else 8 < rows <= 32):
        return 2, 3  # looking up waits: rather the company of other programs
    if 64 < rows <= 128 and format.bits == 8 and format.activations is None:
        # With less read ahead, two programs find room on a multiprocessor, where there are so many.
        beside = product.tiles(_tiles(product)[0]) >= 2 * product.limits.multiprocessors
        return (2, 3) if beside else (3, 2)
    if rows <= 32 and (format.activations or format.group_size is None):
        return 4, 3, 2
    return 3, 2


def _widths(product: _Product) -> tuple[int | None, ...]:
    """Lanes of a plane that a step takes, the best number first."""
    lanes = widths(product.format)
    shares = code_kinds.of(product.format).shared_bytes > 0 and product.rows > 32
    return lanes[::-1] if shares else lanes


def _scaling(product: _Product, tile: Tile) -> Literal["accumulator", "weight"]:
    """Where the scale is applied.

    It costs an operation for each output and group in the accumulator, and one for every two
    weights otherwise. With four warps, which means `wgmma`, the compiler also loads it ahead only
    if it is part of an operand. Symmetric weights in bfloat16 take it for free.
    """
    pays = tile.rows >= 64 or product.has_table or product.format.symmetric
    return "weight" if pays and can_scale_weights(product.format) else "accumulator"


class _Division(NamedTuple):
    """How many programs share a tile past the `unsplit` channels, and what `_steps` says of it."""

    splits: int
    unsplit: int | None
    steps: float


def _divide(product: _Product, tile: Tile) -> _Division:
    """Programs that share a tile: all run at once, and the longest and busiest are waited for."""
    multiprocessors, tiles = product.limits.multiprocessors, product.tiles(tile)
    sizes = range(1, most_splits(product.format, product.channels) + 1)

    if tile == LARGEST_TILE:  # which a multiprocessor runs one of at a time
        divisions = [_Division(size, None, _steps(product, size, tiles)) for size in sizes]
        tiles_m = -(-product.rows // tile.rows)
        tiles_n = tiles // multiprocessors * multiprocessors // tiles_m
        if tiles_n:  # of whole rounds first, and then what is left over
            whole = _steps(product, 1, tiles_m * tiles_n) + BEGINNING
            for size in sizes[1:]:
                steps = whole + _steps(product, size, tiles - tiles_m * tiles_n)
                divisions.append(_Division(size, tiles_n * tile.outputs, steps))
        return min(divisions, key=lambda division: division.steps)
    # Programs hide each other's waits: twice as many are worth 1.4 times the steps.
    wanted = multiprocessors * PROGRAMS_PER_MULTIPROCESSOR[tile.rows] // tiles
    splits = min(
        sizes[: max(1, wanted)], key=lambda splits: _busiest(product, splits, tiles) ** 2 / splits
    )
    return _Division(splits, None, _steps(product, splits, tiles))


def _steps(product: _Product, splits: int, tiles: int) -> float:
    """`_busiest`, and what programs take to begin and partial sums to be added, in steps, too."""
    sums = PARTIAL_SUM * tiles * splits if splits > 1 else 0
    beginnings = product.rounds(splits * tiles) * BEGINNING
    return _busiest(product, splits, tiles) + beginnings + sums


def _busiest(product: _Product, splits: int, tiles: int) -> int:
    """Steps of K that the busiest multiprocessor works off, one program after another."""
    return product.rounds(splits * tiles) * -(-product.blocks // splits)


def most_splits(format: WeightFormat, channels: int) -> int:
    """The most programs that may share a tile."""
    blocks = -(-channels // format.block)
    return max(1, min(blocks // BLOCKS_PER_SPLIT, MAXIMUM_SPLITS))
