"""The rule for batch-invariant products: the order of a sum does not depend on the number of rows.

Every plan is Triton's kernel. Its splits and its steps of K depend on the weight alone, and so does
where scales are applied. The rows of a tile may vary: they are the narrow side of the tensor-core
instruction, and each output is summed over K by itself. A tile has four warps for each 64 output
channels, so that all of them multiply by the same instruction (`wgmma` on Hopper).
"""

from __future__ import annotations

import dataclasses

from mpjax.kernels import device
from mpjax.kernels.gemm.plans.configuration import Scaling, TritonConfig
from mpjax.kernels.gemm.plans.limits import can_scale_weights, why_not_triton, why_unsound, widths
from mpjax.kernels.gemm.plans.problem import Problem
from mpjax.kernels.gemm.plans.triton_rule import LARGEST_TILE, TILES, Tile, divide
from mpjax.kernels.plans.plan import Plan

# With more rows, a program computes all splits one after another, and adds up their sums as the
# next kernel would: several float32 terms of so many rows take longer than they save.
MOST_ROWS_OF_TERMS = TILES[-1].rows
STAGES = 4, 3, 2  # to try in turn


def invariant_plan(problem: Problem) -> Plan:
    """The batch-invariant plan of a problem.

    Raises UnsupportedError, with the reason, if the GPU can't multiply the format by this kernel.
    """
    if reason := why_not_triton(problem):
        raise device.UnsupportedError(f"no batch-invariant product of {problem.format}: {reason}")
    is_scaled = can_scale_weights(problem.weight)
    scaling: Scaling = "weight" if is_scaled else "accumulator"
    # A program that adds up splits must round as terms do, but a factor of a term would be fused
    # with the addition.
    splits = divide(dataclasses.replace(problem, rows=1), TILES[0]).splits if is_scaled else 1
    is_serial = splits > 1 and problem.rows > MOST_ROWS_OF_TERMS

    def found(tile: Tile, width: int | None) -> TritonConfig | str:
        reason: str | None = ""
        for stages in STAGES:
            config = TritonConfig(
                *(tile.rows, tile.outputs, splits, tile.warps, stages, scaling, width),
                serial=is_serial or None,
            )
            if (reason := why_unsound(config, problem)) is None:
                return config
        return reason or ""

    for width in widths(problem.weight):  # the first that every number of rows can have
        largest = found(TILES[-1], width)
        if not isinstance(largest, str):
            tiles = [next((tile for tile in TILES if problem.rows <= tile.rows), TILES[-1])]
            if problem.rows > 2 * MOST_ROWS_OF_TERMS and problem.weight.operand is None:
                tiles.insert(0, LARGEST_TILE)
            configs = (found(tile, width) for tile in tiles)
            return Plan("triton", next(it for it in configs if not isinstance(it, str)))
    raise device.UnsupportedError(f"no batch-invariant product of {problem.format}: {largest}")
