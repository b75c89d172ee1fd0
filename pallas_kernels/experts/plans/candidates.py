"""The plans of a grouped product that `mpjax tune` measures."""

from __future__ import annotations

import itertools
import math

from mpjax.kernels.experts.plans.configuration import ExpertsConfig, Tiling
from mpjax.kernels.experts.plans.problem import Problem
from mpjax.kernels.experts.plans.rule import ROWS, config_by_rule, plan_by_rule
from mpjax.kernels.experts.plans.tables import TABLES
from mpjax.kernels.gemm.plans import SCALINGS
from mpjax.kernels.plans.plan import Plan

MOST_COUNTED_PAIRS = 8192  # counting them compares each one with every expert


def candidates(problem: Problem, most: int = 40) -> list[Plan]:
    """At most `most` plans that a problem can run with, the nearest to the rule's first.

    The distance of two configurations is the sum of the differences in the base-2 logarithms of
    tile_m, tile_n, splits and warps, and in stages; plus 1 for another scaling or tiling.
    """
    rule = plan_by_rule(problem)
    if rule.implementation != "triton":
        return [rule]
    center = config_by_rule(problem)

    def distance(config: ExpertsConfig) -> float:
        moved = sum(abs(a - b) for a, b in zip(_place(config), _place(center), strict=True))
        return moved + (config.scaling != center.scaling) + (config.tiling != center.tiling)

    space = itertools.product(
        [rows for rows in ROWS if center.tile_m / 4 <= rows <= center.tile_m * 4],
        (32, 64, 128, 256),
        (1, 2, 4, 8),
        (1, 2, 4, 8),
        (2, 3, 4, 5),
        SCALINGS if problem.format.weight.is_packed else (center.scaling,),
        (center.width,),
        (None,),
        _tilings(problem),
    )
    found = {center} | {ExpertsConfig(*fields) for fields in space}
    sound = [config for config in found if config == center or _is_sound(problem, config)]
    nearest = sorted(sound, key=lambda config: (distance(config), repr(config)))
    return [Plan("triton", config) for config in nearest[:most]]


def _place(config: ExpertsConfig) -> tuple[float, ...]:
    sizes = config.tile_m, config.tile_n, config.splits, config.warps
    return *map(math.log2, sizes), config.stages


def _is_sound(problem: Problem, config: ExpertsConfig) -> bool:
    has_outputs = 16 * config.warps <= config.tile_n <= max(64, problem.outputs)
    return has_outputs and TABLES.suits(problem, Plan("triton", config))


def _tilings(problem: Problem) -> tuple[Tiling, ...]:
    """The ways to find tiles that are worth a measurement."""
    found: tuple[Tiling, ...] = ("sorted",)
    if problem.pairs <= MOST_COUNTED_PAIRS:
        found = ("counted", *found)
    return ("pairs", *found) if problem.pairs <= problem.experts else found
