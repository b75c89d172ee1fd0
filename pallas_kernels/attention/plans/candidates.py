"""The plans of attention that are worth measuring."""

from __future__ import annotations

import dataclasses
import itertools
import math

from mpjax.kernels.attention.plans.configuration import AttentionConfig, why_unsound
from mpjax.kernels.attention.plans.problem import Problem
from mpjax.kernels.attention.plans.register_rule import CROWDED_REGISTERS, registers_by_rule
from mpjax.kernels.attention.plans.rule import MOST_RESIDUAL_SPLITS, config_by_rule
from mpjax.kernels.attention.plans.split_rule import MOST_SPLITS, SMALL_KEYS
from mpjax.kernels.plans.plan import Plan
from mpjax.kernels.registers import MOST_REGISTERS

REGISTERS = (None, CROWDED_REGISTERS, MOST_REGISTERS)  # beside the rule's choice
OTHER_REGISTERS = 1.5  # the distance between configurations that differ in registers
SPLIT_FACTORS = (0.5, 0.75, 0.875, 1.125, 1.25, 1.5, 2)


def candidates(problem: Problem, most: int = 24) -> list[Plan]:
    """The valid plans for a problem that are nearest to the rule's, nearest first; at most `most`.

    The distance of two plans adds up doublings of a tile's sides, of warps and of splits, steps of
    stages and of programs for the residual, and OTHER_REGISTERS for registers that differ from the
    rule's.
    """
    center = config_by_rule(problem)
    distances = {center: 0.0}
    for config in _neighbours(problem, center):
        usual = dataclasses.replace(config, registers=registers_by_rule(problem, config))
        distance = _distance(config, center)
        distances.setdefault(usual, distance)
        for registers in REGISTERS:
            other = dataclasses.replace(config, registers=registers)
            distances.setdefault(other, distance + OTHER_REGISTERS)
    ordered = sorted(distances, key=lambda config: (distances[config], repr(config)))
    sound = (config for config in ordered if why_unsound(config, problem) is None)
    return [Plan("triton", config) for config in itertools.islice(sound, most)]


def _distance(config: AttentionConfig, center: AttentionConfig) -> float:
    doublings = sum(
        abs(math.log2(getattr(config, name) / getattr(center, name)))
        for name in ("tile_rows", "tile_keys", "splits", "warps")
    )
    steps = abs(config.stages - center.stages)
    return doublings + steps + abs(config.residual_splits - center.residual_splits)


def _neighbours(problem: Problem, center: AttentionConfig) -> list[AttentionConfig]:
    """The configurations around `center`, valid or not, whose tiles fit the page size."""
    shared = {min(MOST_SPLITS, max(1, round(center.splits * f))) for f in SPLIT_FACTORS}
    largest = max(problem.cache.page_size, SMALL_KEYS)
    space = itertools.product(
        (center.tile_rows // 2, center.tile_rows, 2 * center.tile_rows),
        [keys for keys in {SMALL_KEYS, center.tile_keys, 2 * SMALL_KEYS} if keys <= largest],
        shared | {center.splits, center.splits + 1},
        {max(1, center.warps // 2), center.warps, 2 * center.warps},
        (2, 3, 4),
        range(MOST_RESIDUAL_SPLITS + 1) if problem.residual else (0,),
    )
    return [
        dataclasses.replace(
            center,
            tile_rows=rows,
            tile_keys=keys,
            splits=splits,
            warps=warps,
            stages=stages,
            residual_splits=residual_splits,
        )
        for rows, keys, splits, warps, stages, residual_splits in space
    ]
