"""The plans of a grouped product that `mpjax tune` measures."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

from mpjax.kernels.experts.plans.configuration import ExpertsConfig, Tiling
from mpjax.kernels.experts.plans.problem import Problem
from mpjax.kernels.experts.plans.rule import (
    ROWS,
    config_by_rule,
    plan_by_rule,
    warpgroups_by_rule,
)
from mpjax.kernels.experts.plans.warpgroup_rule import (
    ranked,
    suits_warpgroups,
    why_not_warpgroups,
)
from mpjax.kernels.experts.plans.warpgroup_rule import why_unsound as why_not_by_warpgroups
from mpjax.kernels.gemm.plans import SCALINGS, why_unsound
from mpjax.kernels.plans.plan import Plan

MOST_COMPARISONS = 2**21  # counting compares each pair with every expert
TRITON_SHARE = 3  # if the rule chooses warpgroups, one candidate in three is Triton's


def candidates(problem: Problem, most: int = 40) -> list[Plan]:
    """At most `most` plans with which a problem can run, the most promising first.

    If the rule chooses the warpgroup kernel, its plans come first, in the order of the cost model.
    Triton's are in the order of their distance from the rule's. The distance of two configurations
    is the sum of the differences in the base-2 logarithms of tile_m, tile_n, splits and warps, and
    in stages; plus 1 for another scaling or tiling.
    """
    rule = plan_by_rule(problem, warpgroups=False)
    if rule.implementation != "triton":
        return [rule]
    if not suits_warpgroups(problem):
        return _by_triton(problem, most)
    by_warpgroups = _by_warpgroups(problem, most - most // TRITON_SHARE)
    return [*by_warpgroups, *_by_triton(problem, most - len(by_warpgroups))]


def can_run(problem: Problem, plan: Plan) -> bool:
    """Whether a problem can run with a plan on its GPU."""
    config: Any = plan.config
    if plan.implementation == "mosaic":
        return (why_not_warpgroups(problem) or why_not_by_warpgroups(config, problem)) is None
    if not problem.format.weight.is_packed:
        return True
    return why_unsound(config, problem.product(config.tile_m)) is None


def _by_warpgroups(problem: Problem, most: int) -> list[Plan]:
    """Plans of the warpgroup kernel: each configuration with every tiling, the rule's first."""
    rule = warpgroups_by_rule(problem)
    tilings = [tiling for tiling in _tilings(problem) if tiling not in ("pairs", rule.tiling)]
    configs = [
        dataclasses.replace(config, tiling=tiling)
        for config in ranked(problem)
        for tiling in (rule.tiling, *tilings)
    ]
    return [Plan("mosaic", config) for config in configs[:most]]


def _by_triton(problem: Problem, most: int) -> list[Plan]:
    center = config_by_rule(problem)

    def distance(config: ExpertsConfig) -> float:
        moved = sum(abs(a - b) for a, b in zip(_place(config), _place(center), strict=True))
        return moved + (config.scaling != center.scaling) + (config.tiling != center.tiling)

    # A first product with whole sums and a tile for each pair routes tokens itself, which saves a
    # kernel that a measurement of only the product does not include.
    routes = problem.gated and center.tiling == "pairs" and center.splits == 1
    space = itertools.product(
        [rows for rows in ROWS if center.tile_m / 4 <= rows <= center.tile_m * 4],
        (32, 64, 128, 256),
        (1,) if routes else (1, 2, 4, 8),
        (1, 2, 4, 8),
        (2, 3, 4, 5),
        SCALINGS if problem.format.weight.is_packed else (center.scaling,),
        (center.width,),
        _tilings(problem),
    )
    found = {center}
    for rows, outputs, splits, warps, stages, scaling, width, tiling in space:
        sizes = rows, outputs, splits, warps, stages, scaling, width
        found.add(ExpertsConfig(*sizes, tiling=tiling))
    sound = [config for config in found if config == center or _is_sound(problem, config)]
    nearest = sorted(sound, key=lambda config: (distance(config), repr(config)))
    return [Plan("triton", config) for config in nearest[:most]]


def _place(config: ExpertsConfig) -> tuple[float, ...]:
    sizes = config.tile_m, config.tile_n, config.splits, config.warps
    return *map(math.log2, sizes), config.stages


def _is_sound(problem: Problem, config: ExpertsConfig) -> bool:
    has_outputs = 16 * config.warps <= config.tile_n <= max(64, problem.outputs)
    return has_outputs and can_run(problem, Plan("triton", config))


def _tilings(problem: Problem) -> tuple[Tiling, ...]:
    """The tilings that are worth a measurement; the experts of one token differ."""
    if problem.tokens == 1:
        return ("pairs",)
    found: tuple[Tiling, ...] = ("sorted",)
    if problem.pairs * problem.experts <= MOST_COMPARISONS:
        found = ("counted", *found)
    return ("pairs", *found) if problem.pairs <= problem.experts else found
