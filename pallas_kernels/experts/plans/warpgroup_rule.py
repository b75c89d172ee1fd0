"""The rule for grouped products by warpgroups: the configuration that the cost model ranks first.

The model is that of the dense product (`gemm.plans.cost_model`), with the expected number of row
tiles for tokens that choose their experts at random.
"""

from __future__ import annotations

import dataclasses
import math

from mpjax.kernels.experts.plans.configuration import ExpertsWarpgroupConfig, Tiling
from mpjax.kernels.experts.plans.problem import Problem
from mpjax.kernels.gemm.plans import (
    FEW_ROWS,
    WarpgroupConfig,
    microseconds,
    why_unsound_warpgroups,
)
from mpjax.kernels.gemm.plans import why_not_warpgroups as why_not_dense
from mpjax.kernels.mosaic import WARPGROUP_OUTPUTS

MOST_TILE_ROWS = 256
HEIGHTS = tuple(range(48, MOST_TILE_ROWS + 1, 16))  # rows of a tile for `wgmma`
WARPGROUPS = (2, 3, 4)


def why_not_warpgroups(problem: Problem) -> str | None:
    """The reason why the warpgroup kernel can't multiply a problem, or None if it can."""
    weight = problem.format.weight
    if not weight.is_packed and problem.channels % weight.block:
        return (
            f"{problem.channels} input channels of plain weights are no multiple of {weight.block}"
        )
    if reason := why_not_dense(problem.product(1)):
        return reason
    if problem.outputs % (problem.halves * WARPGROUP_OUTPUTS):
        return (
            f"{problem.outputs} output channels are no multiple of "
            f"{problem.halves * WARPGROUP_OUTPUTS}"
        )
    if not ranked(problem):
        return f"no tile of {problem.format} fits shared memory"
    return None


def why_unsound(config: WarpgroupConfig, problem: Problem) -> str | None:
    """The reason why the kernel can't run with a configuration, or None if it can."""
    if config.splits != 1 or config.shares != 1:
        return f"{config.splits} splits and {config.shares} shares; an expert has one of each"
    return why_unsound_warpgroups(config, problem.format.weight, gated=problem.gated)


def ranked(problem: Problem, tiling: Tiling = "sorted") -> list[ExpertsWarpgroupConfig]:
    """All valid configurations, the fastest by the cost model first."""
    configs = [
        ExpertsWarpgroupConfig(rows, warpgroups, 1, tiling=tiling)
        for rows in HEIGHTS
        for warpgroups in WARPGROUPS
    ]
    sound = [config for config in configs if why_unsound(config, problem) is None]
    return sorted(sound, key=lambda config: _microseconds(config, problem))


def suits_warpgroups(problem: Problem) -> bool:
    """Whether the rule chooses the warpgroup kernel.

    It does if experts with tokens have more than FEW_ROWS of them on average. For fewer, Triton's
    kernel decodes an expert for few rows, and sorting them would take as long.
    """
    return problem.own_pairs > FEW_ROWS * problem.hit and why_not_warpgroups(problem) is None


def expected_tiles(problem: Problem, rows: int) -> float:
    """The expected number of tiles of `rows` rows, if all experts are equally likely.

    An expert's number of tokens is assumed to be normally distributed. It has a tile for every j
    with more than j · rows tokens.
    """
    mean = problem.pairs / problem.experts
    spread = math.sqrt(2 * mean * max(1 - problem.per_token / problem.experts, 1e-6))
    total, tile = 0.0, 0
    while True:
        share = 0.5 * math.erfc((tile * rows + 0.5 - mean) / spread)
        if share < 1e-3:
            return max(1.0, problem.held * total)
        total, tile = total + share, tile + 1


def _microseconds(config: WarpgroupConfig, problem: Problem) -> float:
    """The estimated time, with the concatenated outputs of all tiles."""
    outputs = problem.outputs * expected_tiles(problem, config.tile_m)
    product = dataclasses.replace(problem.product(config.tile_m), outputs=math.ceil(outputs))
    return microseconds(config, product)
