"""The plans of a product that `mpjax tune` measures."""

from __future__ import annotations

import dataclasses
import itertools
import math

from mpjax.kernels.gemm.plans.configuration import ROW_MULTIPLE, SCALINGS, TritonConfig
from mpjax.kernels.gemm.plans.limits import (
    why_not_triton,
    why_not_warpgroups,
    why_unsound,
    widths,
)
from mpjax.kernels.gemm.plans.problem import Problem
from mpjax.kernels.gemm.plans.rule import plan_by_rule, unfused
from mpjax.kernels.gemm.plans.triton_rule import most_splits, triton_by_rule
from mpjax.kernels.gemm.plans.warpgroup_rule import ranked
from mpjax.kernels.plans.plan import Plan

WARPGROUP_SHARE = 3  # one candidate in three is for the warpgroups' kernel


def candidates(problem: Problem, most: int = 40) -> list[Plan]:
    """At most `most` plans with which a problem can run, the most promising first.

    Plans of the kernel that the rule chooses come first, in the order of their distance from the
    rule's configuration, then those of the other fused kernel. The last plan is always the unfused
    implementation for many rows.

    problem: its rows are one of BUCKETS.
    """
    # The unfused plan has no tiles to choose, and its time is an upper bound for any plan.
    other = Plan(unfused(problem))
    if why_not_triton(problem):
        return [other]
    plans = [Plan("triton", config) for config in _triton_configs(problem)]
    can_have_warpgroups = problem.rows >= ROW_MULTIPLE or problem.has_table
    if can_have_warpgroups and why_not_warpgroups(problem) is None:
        best = ranked(problem)[: most // WARPGROUP_SHARE]
        plans = [*plans[: most - len(best) - 1], *(Plan("mosaic", config) for config in best)]
        rule = plan_by_rule(problem)
        plans.sort(key=lambda plan: plan.implementation != rule.implementation)
    return [*plans[: most - 1], other]


def _triton_configs(problem: Problem) -> list[TritonConfig]:
    """Valid configurations of Triton's kernel, the nearest to the rule's first.

    The distance of two configurations is the sum of the differences in the base-2 logarithms of
    tile_m, tile_n, outputs per warp, width and the number of warps in all programs, and in stages;
    plus 1 if they scale differently.
    """
    center = triton_by_rule(problem)

    def place(config: TritonConfig) -> tuple[float, ...]:
        tiles = -(-problem.rows // config.tile_m) * -(-problem.outputs // config.tile_n)
        per_warp = config.tile_n / config.warps
        width = config.width or problem.weight.plane_width
        logarithms = map(math.log2, (config.tile_m, config.tile_n, per_warp, width))
        return *logarithms, math.log2(tiles * config.splits * config.warps), config.stages

    def distance(config: TritonConfig) -> float:
        moved = sum(abs(a - b) for a, b in zip(place(config), place(center), strict=True))
        return moved + (config.scaling != center.scaling)

    height = max(8, min(256, 2 ** math.ceil(math.log2(problem.rows))))
    space = itertools.product(
        [size for size in (height, height // 2, height // 4) if size >= 8],
        (32, 64, 128, 256),
        [splits for splits in (1, 2, 3, 4, 6, 8) if splits <= most_splits(problem)],
        (1, 2, 4, 8),
        (2, 3, 4, 5),
        SCALINGS,
        widths(problem.weight),
    )
    configs = {center} | {TritonConfig(*fields) for fields in space}
    if center.unsplit is not None:
        alike = [c for c in configs if (c.tile_m, c.tile_n) == (center.tile_m, center.tile_n)]
        configs |= {dataclasses.replace(c, unsplit=center.unsplit) for c in alike if c.splits > 1}
    sound = [config for config in configs if why_unsound(config, problem) is None]
    return sorted(sound, key=lambda config: (distance(config), repr(config)))
