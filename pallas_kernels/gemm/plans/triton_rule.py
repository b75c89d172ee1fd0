"""The rule for Triton's kernel: the tiles of a product, and the splits of K.

The rule chooses a tile by the number of rows (`_tiles`), and enough splits of K to keep all
multiprocessors busy (`divide`). Costs are compared in steps: a step is the time in which a
multiprocessor multiplies one block of K of a tile. All constants were measured on an H200.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from mpjax.kernels import codes as code_kinds
from mpjax.kernels import device
from mpjax.kernels.gemm.plans.configuration import Scaling, TritonConfig
from mpjax.kernels.gemm.plans.limits import can_scale_weights, why_unsound, widths
from mpjax.kernels.gemm.plans.problem import Problem


class Tile(NamedTuple):
    """The rows and output channels of a program's tile, and its warps."""

    rows: int
    outputs: int
    warps: int


# The tiles for up to 8, 16, 32 and 64 rows, and for more.
TILES = tuple(Tile(rows, 64, 4) for rows in (8, 16, 32, 64, 128))
# For 65 to 128 rows and a table in shared memory, which leaves more registers for sums.
WIDE_TILE = Tile(64, 128, 4)
# For many rows. It loads operands least often, and a decoded weight serves the most rows, but a
# product needs many rows and outputs to have tiles for all multiprocessors.
LARGEST_TILE = Tile(128, 128, 8)
LARGEST_TILES = {"int8": Tile(128, 128, 4), "liquid4": Tile(256, 64, 4)}
# A step of LARGEST_TILE takes 1.6 times as long as one of the tile below it, for twice the outputs.
# With fewer steps than FEW_STEPS, first loads and partial sums dominate, and the smaller tile wins.
LONGER_STEPS, FEW_STEPS = 1.6, 12
# The number of programs that keep the memory pipeline of a multiprocessor full, by a tile's rows.
# The more rows, the more a program multiplies for each load, and the larger its partial sums are.
PROGRAMS_PER_MULTIPROCESSOR = {8: 4, 16: 4, 32: 3, 64: 2, 128: 1, 256: 1}
# With more programs than this on a multiprocessor, two warps are enough for each.
PROGRAMS_OF_FOUR_WARPS = 3
# Costs in units of one LARGEST_TILE step, of which a multiprocessor runs one program at a time:
# starting a program, and writing and reading back one partial tile.
BEGINNING, PARTIAL_SUM = 1, 0.03
# If the busiest multiprocessor has this multiple of the mean work, programs get two warps, so that
# more programs run at once.
UNEVEN = 1.2
# A split has at least this number of blocks of K, because it adds a partial sum and a pipeline to
# fill.
BLOCKS_PER_SPLIT = 4
MAXIMUM_SPLITS = 8


def triton_by_rule(problem: Problem) -> TritonConfig:
    """The rule's configuration of Triton's kernel, which can always run, for any problem.

    Raises UnsupportedError, with the reason, if the GPU can't multiply the format at all.
    """
    # The first valid combination is chosen, and the last factor changes first: if shared memory is
    # too small, a large tile with fewer lanes or stages is better than a smaller tile.
    for tile, stages, width in itertools.product(
        _tiles(problem), _stages(problem), _widths(problem)
    ):
        splits, unsplit, _ = divide(problem, tile)
        scaling = _scaling(problem, tile)
        config = TritonConfig(
            tile.rows, tile.outputs, splits, tile.warps, stages, scaling, width, unsplit
        )
        if (reason := why_unsound(config, problem)) is None:
            return config
    raise device.UnsupportedError(f"the fused kernel can't multiply {problem.format}: {reason}")


def _is_slow_to_decode(problem: Problem) -> bool:
    """Whether decoding is so slow that each weight should be decoded for few tiles of rows."""
    return problem.weight.bits <= 4 and problem.weight.operand is None


def _largest_tile(problem: Problem) -> Tile:
    return LARGEST_TILES.get(problem.weight.codes, LARGEST_TILE)


def _tile_count(problem: Problem, tile: Tile) -> int:
    """The number of tiles of a product."""
    return -(-problem.rows // tile.rows) * -(-problem.outputs // tile.outputs)


def _rounds(problem: Problem, programs: int) -> int:
    """The number of programs that the busiest multiprocessor runs, out of `programs` in total."""
    return -(-programs // problem.limits.multiprocessors)


def _tiles(problem: Problem) -> list[Tile]:
    """The tiles to try in turn: the best one, then smaller ones in case it doesn't fit."""
    rows, limits, largest = problem.rows, problem.limits, _largest_tile(problem)
    size = next((size for size in range(4) if rows <= TILES[size].rows), 4)
    tiles = list(reversed(TILES[: size + 1]))
    if rows <= 16 and not problem.has_table:  # two warps for many programs or uneven work
        splits = divide(problem, tiles[0]).splits
        programs = splits * _tile_count(problem, tiles[0])
        many = splits > 1 and programs > PROGRAMS_OF_FOUR_WARPS * limits.multiprocessors
        if many or _rounds(problem, programs) * limits.multiprocessors > UNEVEN * programs:
            tiles = [tile._replace(warps=tile.warps // 2) for tile in tiles]
    # Smaller tiles fill the GPU better. Weights that are fast to decode use them up to 256 rows,
    # others up to 128.
    fills = 3 * _tile_count(problem, largest) >= 2 * limits.multiprocessors
    if rows > (128 if _is_slow_to_decode(problem) else 256) and fills:
        tiles.insert(0, largest)
    elif rows > 64 and _is_slow_to_decode(problem) and not problem.has_table:
        longer, shorter = divide(problem, largest).steps, divide(problem, tiles[0]).steps
        if FEW_STEPS <= longer <= shorter / LONGER_STEPS:
            tiles.insert(0, largest)
    if 64 < rows <= 128 and code_kinds.of(problem.weight).shared_bytes:
        tiles.insert(0, WIDE_TILE)
    return tiles


def _stages(problem: Problem) -> tuple[int, ...]:
    """The numbers of steps in flight to try in turn, the best first."""
    rows, format = problem.rows, problem.weight
    if problem.has_table and (rows > 16 if format.bits == 4 else 8 < rows <= 32):
        return 2, 3  # look-ups have a long latency, which more programs hide better than stages
    if 64 < rows <= 128 and format.bits == 8 and format.operand is None:
        # With two stages, two programs fit a multiprocessor, if there are enough programs.
        has_two = _tile_count(problem, _tiles(problem)[0]) >= 2 * problem.limits.multiprocessors
        return (2, 3) if has_two else (3, 2)
    if rows <= 32 and (format.operand or format.group_size is None):
        return 4, 3, 2
    return 3, 2


def _widths(problem: Problem) -> tuple[int | None, ...]:
    """The numbers of lanes of a plane to try in turn for a step, the best first."""
    lanes = widths(problem.weight)
    shares = code_kinds.of(problem.weight).shared_bytes > 0 and problem.rows > 32
    return lanes[::-1] if shares else lanes


def _scaling(problem: Problem, tile: Tile) -> Scaling:
    """Chooses whether the scale of a group multiplies the sum over the group, or its weights.

    Scaling the sum takes an instruction for each output and group; scaling weights takes one for
    every two weights, or none for symmetric weights in bfloat16. With four warps, which multiply by
    `wgmma`, the compiler pipelines the load of a scale only if it is part of an operand. A group of
    `float4` is one plane, so with scaled weights a block takes one product instead of four.
    """
    scales_weights = tile.rows >= 64 or problem.has_table or problem.weight.symmetric
    scales_weights |= problem.weight.codes == "float4" and tile.warps >= 4
    return "weight" if scales_weights and can_scale_weights(problem.weight) else "accumulator"


class _Division(NamedTuple):
    """The division of a product's K: `splits` and `unsplit` as in TritonConfig, and its cost.

    steps: the cost, from `_steps`.
    """

    splits: int
    unsplit: int | None
    steps: float


def divide(problem: Problem, tile: Tile) -> _Division:
    """The best division of K for a tile: the one whose busiest multiprocessor finishes first."""
    multiprocessors, tiles = problem.limits.multiprocessors, _tile_count(problem, tile)
    sizes = range(1, most_splits(problem) + 1)

    # A multiprocessor runs one program of this tile at a time, so steps are compared directly.
    if tile == LARGEST_TILE:
        divisions = [_Division(size, None, _steps(problem, size, tiles)) for size in sizes]
        tiles_m = -(-problem.rows // tile.rows)
        tiles_n = tiles // multiprocessors * multiprocessors // tiles_m
        if tiles_n:  # whole rounds of unsplit tiles first, then the remaining tiles, split
            whole = _steps(problem, 1, tiles_m * tiles_n) + BEGINNING
            for size in sizes[1:]:
                steps = whole + _steps(problem, size, tiles - tiles_m * tiles_n)
                divisions.append(_Division(size, tiles_n * tile.outputs, steps))
        return min(divisions, key=lambda division: division.steps)
    # Smaller programs share a multiprocessor, and hide each other's latencies. Twice as many are
    # worth √2 times the steps, so steps² / splits is compared.
    wanted = multiprocessors * PROGRAMS_PER_MULTIPROCESSOR[tile.rows] // tiles
    splits = min(
        sizes[: max(1, wanted)], key=lambda splits: _busiest(problem, splits, tiles) ** 2 / splits
    )
    return _Division(splits, None, _steps(problem, splits, tiles))


def _steps(problem: Problem, splits: int, tiles: int) -> float:
    """The cost in steps: `_busiest`, the starts of programs, and the partial sums."""
    sums = PARTIAL_SUM * tiles * splits if splits > 1 else 0
    beginnings = _rounds(problem, splits * tiles) * BEGINNING
    return _busiest(problem, splits, tiles) + beginnings + sums


def _busiest(problem: Problem, splits: int, tiles: int) -> int:
    """The total steps of all programs that the busiest multiprocessor runs in turn."""
    return _rounds(problem, splits * tiles) * -(-problem.blocks // splits)


def most_splits(problem: Problem) -> int:
    """The most splits of a problem."""
    return max(1, min(problem.blocks // BLOCKS_PER_SPLIT, MAXIMUM_SPLITS))
