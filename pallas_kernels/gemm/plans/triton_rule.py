"""The rule for Triton's kernel: which tiles a product is cut into, and how K is divided."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from mpjax.kernels import codes as code_kinds
from mpjax.kernels import device
from mpjax.kernels.gemm.plans.configuration import Scaling, TritonConfig
from mpjax.kernels.gemm.plans.limits import can_scale_weights, why_unsound, widths
from mpjax.kernels.gemm.plans.problem import Problem


class Tile(NamedTuple):
    """Rows and output channels that a program multiplies, and its warps."""

    rows: int
    outputs: int
    warps: int


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


def triton_by_rule(problem: Problem) -> TritonConfig:
    """A sound configuration of Triton's kernel for any problem.

    Raises UnsupportedError, with the reason, where the GPU can't multiply the format at all.
    """
    # Where shared memory does not hold it all, less of a large tile is still better than a smaller
    # one.
    for tile, stages, width in itertools.product(
        _tiles(problem), _stages(problem), _widths(problem)
    ):
        splits, unsplit, _ = _divide(problem, tile)
        scaling = _scaling(problem, tile)
        config = TritonConfig(
            tile.rows, tile.outputs, splits, tile.warps, stages, scaling, width, unsplit
        )
        if (reason := why_unsound(config, problem)) is None:
            return config
    raise device.UnsupportedError(f"the fused kernel can't multiply {problem.format}: {reason}")


def _is_dear(problem: Problem) -> bool:
    """Whether weights cost so much to decode that it should not be done often."""
    return problem.weight.bits <= 4 and problem.weight.operand is None


def _largest_tile(problem: Problem) -> Tile:
    return LARGEST_TILES.get(problem.weight.codes, LARGEST_TILE)


def _count(problem: Problem, tile: Tile) -> int:
    """Tiles that the product is cut into."""
    return -(-problem.rows // tile.rows) * -(-problem.outputs // tile.outputs)


def _rounds(problem: Problem, programs: int) -> int:
    """Programs of the busiest multiprocessor."""
    return -(-programs // problem.limits.multiprocessors)


def _tiles(problem: Problem) -> list[Tile]:
    """The best tile, and smaller ones for where it does not fit."""
    rows, limits, largest = problem.rows, problem.limits, _largest_tile(problem)
    size = next((size for size in range(4) if rows <= TILES[size].rows), 4)
    tiles = list(reversed(TILES[: size + 1]))
    if rows <= 16 and not problem.has_table:
        splits = _divide(problem, tiles[0]).splits
        programs = splits * _count(problem, tiles[0])
        many = splits > 1 and programs > PROGRAMS_OF_FOUR_WARPS * limits.multiprocessors
        if many or _rounds(problem, programs) * limits.multiprocessors > UNEVEN * programs:
            tiles = [tile._replace(warps=tile.warps // 2) for tile in tiles]
    # What is cheap to decode can be decoded more often, in smaller tiles that fill the GPU better.
    fills = 3 * _count(problem, largest) >= 2 * limits.multiprocessors
    if rows > (128 if _is_dear(problem) else 256) and fills:
        tiles.insert(0, largest)
    elif rows > 64 and _is_dear(problem) and not problem.has_table:
        longer, shorter = _divide(problem, largest).steps, _divide(problem, tiles[0]).steps
        if FEW_STEPS <= longer <= shorter / LONGER_STEPS:
            tiles.insert(0, largest)
    if 64 < rows <= 128 and code_kinds.of(problem.weight).shared_bytes:
        tiles.insert(0, WIDE_TILE)
    return tiles


def _stages(problem: Problem) -> tuple[int, ...]:
    """Steps of K in flight, the best number first."""
    rows, format = problem.rows, problem.weight
    if problem.has_table and (rows > 16 if format.bits == 4 else 8 < rows <= 32):
        return 2, 3  # looking up waits: rather the company of other programs
    if 64 < rows <= 128 and format.bits == 8 and format.operand is None:
        # With less read ahead, two programs find room on a multiprocessor, where there are so many.
        beside = _count(problem, _tiles(problem)[0]) >= 2 * problem.limits.multiprocessors
        return (2, 3) if beside else (3, 2)
    if rows <= 32 and (format.operand or format.group_size is None):
        return 4, 3, 2
    return 3, 2


def _widths(problem: Problem) -> tuple[int | None, ...]:
    """Lanes of a plane that a step takes, the best number first."""
    lanes = widths(problem.weight)
    shares = code_kinds.of(problem.weight).shared_bytes > 0 and problem.rows > 32
    return lanes[::-1] if shares else lanes


def _scaling(problem: Problem, tile: Tile) -> Scaling:
    """Where the scale is applied.

    It costs an operation for each output and group in the accumulator, and one for every two
    weights otherwise. With four warps, which means `wgmma`, the compiler also loads it ahead only
    if it is part of an operand. Symmetric weights in bfloat16 take it for free.
    """
    pays = tile.rows >= 64 or problem.has_table or problem.weight.symmetric
    return "weight" if pays and can_scale_weights(problem.weight) else "accumulator"


class _Division(NamedTuple):
    """How many programs share a tile past the `unsplit` channels, and what `_steps` says of it."""

    splits: int
    unsplit: int | None
    steps: float


def _divide(problem: Problem, tile: Tile) -> _Division:
    """Programs that share a tile: all run at once, and the longest and busiest are waited for."""
    multiprocessors, tiles = problem.limits.multiprocessors, _count(problem, tile)
    sizes = range(1, most_splits(problem) + 1)

    if tile == LARGEST_TILE:  # which a multiprocessor runs one of at a time
        divisions = [_Division(size, None, _steps(problem, size, tiles)) for size in sizes]
        tiles_m = -(-problem.rows // tile.rows)
        tiles_n = tiles // multiprocessors * multiprocessors // tiles_m
        if tiles_n:  # of whole rounds first, and then what is left over
            whole = _steps(problem, 1, tiles_m * tiles_n) + BEGINNING
            for size in sizes[1:]:
                steps = whole + _steps(problem, size, tiles - tiles_m * tiles_n)
                divisions.append(_Division(size, tiles_n * tile.outputs, steps))
        return min(divisions, key=lambda division: division.steps)
    # Programs hide each other's waits: twice as many are worth 1.4 times the steps.
    wanted = multiprocessors * PROGRAMS_PER_MULTIPROCESSOR[tile.rows] // tiles
    splits = min(
        sizes[: max(1, wanted)], key=lambda splits: _busiest(problem, splits, tiles) ** 2 / splits
    )
    return _Division(splits, None, _steps(problem, splits, tiles))


def _steps(problem: Problem, splits: int, tiles: int) -> float:
    """`_busiest`, and what programs take to begin and partial sums to be added, in steps, too."""
    sums = PARTIAL_SUM * tiles * splits if splits > 1 else 0
    beginnings = _rounds(problem, splits * tiles) * BEGINNING
    return _busiest(problem, splits, tiles) + beginnings + sums


def _busiest(problem: Problem, splits: int, tiles: int) -> int:
    """Steps of K that the busiest multiprocessor works off, one program after another."""
    return _rounds(problem, splits * tiles) * -(-problem.blocks // splits)


def most_splits(problem: Problem) -> int:
    """The most programs that may share a tile."""
    return max(1, min(problem.blocks // BLOCKS_PER_SPLIT, MAXIMUM_SPLITS))
