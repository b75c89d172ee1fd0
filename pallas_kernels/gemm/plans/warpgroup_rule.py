"""The rule for the warpgroup kernel: the valid configuration that the cost model ranks first."""

from __future__ import annotations

import itertools

from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.gemm.plans.configuration import (
    FEW_ROWS,
    INT8_ROW_MULTIPLE,
    ROW_MULTIPLE,
    WarpgroupConfig,
)
from mpjax.kernels.gemm.plans.cost_model import microseconds
from mpjax.kernels.gemm.plans.problem import Problem
from mpjax.kernels.gemm.plans.shared_memory import why_no_room

# The most rows of a tile, by the number of consumers. One program has all registers of its
# multiprocessor; with three consumers a thread has 160. If weights are decoded into registers, less
# than half can be sums. A plain int8 matrix is not decoded, and liquid4 is decoded to 8 bits, which
# takes half the registers.
MOST_ROWS = {2: 256, 3: 128, 4: FEW_ROWS}
MOST_ROWS_OF_INT8 = {2: 256, 3: 256, 4: FEW_ROWS}
MOST_ROWS_OF_LIQUID4 = {2: 256, 3: 192, 4: FEW_ROWS}
# A consumer of int4 has two sums, one of a block and one of all blocks.
MOST_ROWS_OF_INT4 = {2: 128, 3: 96, 4: 64}
INT4_ROW_MULTIPLE = 32  # a copy has a multiple of 128 bytes, also of the float32 scales of rows
# Tiles of 8-bit activations with more rows than MOST_ROWS are multiplied as two products.
TWO_PRODUCTS_ROW_MULTIPLE = 32
MOST_SPLITS = 8
LEAST_BLOCKS = 2  # the fewest blocks of K in a split


def warpgroups_by_rule(problem: Problem) -> WarpgroupConfig:
    """The valid configuration that the cost model ranks first."""
    return ranked(problem)[0]


def ranked(problem: Problem) -> list[WarpgroupConfig]:
    """All valid configurations, the fastest by the cost model first."""
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
    """The number whose multiples a tile's rows must be. rows: of the tile, or of the problem."""
    if format.codes == "int4":
        return INT4_ROW_MULTIPLE
    is_int8 = format.operand == "int8"
    return INT8_ROW_MULTIPLE if is_int8 and rows > FEW_ROWS else ROW_MULTIPLE


def _row_limits(config: WarpgroupConfig, format: WeightFormat) -> tuple[int, int]:
    """The number whose multiples a tile's rows must be, and the most rows."""
    step, most = _row_step(config.tile_m, format), MOST_ROWS[config.warpgroups]
    if format.codes == "int4":
        return step, MOST_ROWS_OF_INT4[config.warpgroups]
    if format.operand and config.tile_m > most:
        by_warpgroups = MOST_ROWS_OF_INT8 if format.is_flat else MOST_ROWS_OF_LIQUID4
        return TWO_PRODUCTS_ROW_MULTIPLE, by_warpgroups[config.warpgroups]
    if config.warpgroups == 4 and format.is_packed and not format.operand:
        return step, config.most_rows_of_four
    return step, most


def why_unsound(
    config: WarpgroupConfig, format: WeightFormat, *, gated: bool = False
) -> str | None:
    """The reason why the warpgroup kernel can't run with a configuration, or None if it can.

    gated: whether the epilogue combines halves of a tile's output channels, as for experts.
    """
    if config.warpgroups not in MOST_ROWS:
        return f"{config.warpgroups} warpgroups; there can be {', '.join(map(str, MOST_ROWS))}"
    if format.codes == "int4" and config.has_few_rows:
        return f"{config.tile_m} rows in a tile; int4 has no main loop for {FEW_ROWS} or fewer"
    step, most = _row_limits(config, format)
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
    if gated and config.warpgroups % 2:
        return f"{config.warpgroups} warpgroups can't divide gate and up evenly"
    return why_no_room(format, config, gated=gated)
