"""The rule of thumb for the warpgroups' kernel: which tiles a product is cut into."""

from __future__ import annotations

import itertools

from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.gemm.plans.configuration import FEW_ROWS, INTEGER_ROWS, ROWS, WarpgroupConfig
from mpjax.kernels.gemm.plans.cost_model import microseconds
from mpjax.kernels.gemm.plans.problem import Problem
from mpjax.kernels.gemm.plans.shared_memory import why_no_room

# A program has a multiprocessor to itself: its threads begin with all registers. With three
# computing warpgroups these are 160 for each thread, and less than half of them can be sums, where
# weights are decoded into others.
MOST_ROWS = {2: 256, 3: 128, 4: FEW_ROWS}  # of a tile, by warpgroups
MOST_ROWS_OF_MATRIX = {2: 256, 3: 256, 4: FEW_ROWS}
MOST_ROWS_OF_LEVELS = {2: 256, 3: 192, 4: FEW_ROWS}  # decoded into 8 bits: half the registers
HALVED_ROWS = 32  # what tiles of two products are a multiple of
MOST_SPLITS = 8
LEAST_BLOCKS = 2  # of K in a program's part


def warpgroups_by_rule(problem: Problem) -> WarpgroupConfig:
    """The configuration that the cost model finds the fastest."""
    return ranked(problem)[0]


def ranked(problem: Problem) -> list[WarpgroupConfig]:
    """All sound configurations, the fastest by the cost model first."""
    rows, format = problem.rows, problem.weight
    heights = {64, 96, 128, 192, 256}
    if rows <= min(heights):
        step = _row_step(rows, format)
        heights = {-(-rows // step) * step}
    splits = range(1, max(1, min(MOST_SPLITS, problem.blocks // LEAST_BLOCKS)) + 1)
    space = itertools.product(sorted(heights), MOST_ROWS, splits, range(1, max(MOST_ROWS) + 1))
    configs = [WarpgroupConfig(*fields) for fields in space]
    sound = [config for config in configs if why_unsound(config, format) is None]
    return sorted(sound, key=lambda config: microseconds(config, problem))


def _row_step(rows: int, format: WeightFormat) -> int:
    """What the rows of a tile are a multiple of."""
    return INTEGER_ROWS if format.operand == "int8" and rows > FEW_ROWS else ROWS


def why_unsound(config: WarpgroupConfig, format: WeightFormat) -> str | None:
    """Why a configuration can't run; None if it can."""
    if config.warpgroups not in MOST_ROWS:
        return f"{config.warpgroups} warpgroups; there can be {', '.join(map(str, MOST_ROWS))}"
    step, most = _row_step(config.tile_m, format), MOST_ROWS[config.warpgroups]
    if format.operand and config.tile_m > most:
        rows = MOST_ROWS_OF_MATRIX if format.is_flat else MOST_ROWS_OF_LEVELS
        step, most = HALVED_ROWS, rows[config.warpgroups]
    if config.tile_m % step or config.tile_m > most:
        return (
            f"{config.tile_m} rows in a tile of {config.warpgroups} warpgroups; there can be a "
            f"multiple of {step}, to {most}"
        )
    if config.warpgroups % config.shares:
        return f"{config.shares} of {config.warpgroups} warpgroups can't share outputs: no divisor"
    if config.shares > 1 and (format.is_flat or not config.has_few_rows):
        return (
            f"{config.shares} warpgroups can't share outputs of {config.tile_m} rows of {format}; "
            f"up to {FEW_ROWS} can, of weights that are decoded"
        )
    return why_no_room(format, config)
