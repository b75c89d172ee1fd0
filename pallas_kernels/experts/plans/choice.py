"""The planner of grouped products."""

from __future__ import annotations

from mpjax.kernels import device
from mpjax.kernels.experts.plans.configuration import ExpertsConfig, ExpertsWarpgroupConfig
from mpjax.kernels.experts.plans.problem import Problem
from mpjax.kernels.experts.plans.rule import config_by_rule, plan_by_rule, warpgroups_by_rule
from mpjax.kernels.experts.plans.tables import TABLES
from mpjax.kernels.experts.plans.warpgroup_rule import (
    ranked,
    why_not_warpgroups,
    why_unsound,
)
from mpjax.kernels.plans.planner import Planner

PLANNER = Planner(TABLES, plan_by_rule)
plan_of, forced = PLANNER.plan_of, PLANNER.forced


def runs_by_warpgroups(problem: Problem) -> bool:
    """Whether the warpgroups' kernel is planned and able to run, on the default device.

    Activations are taken to have the weight's dtype, or bfloat16.
    """
    if device.why_triton_cannot_run() is not None:
        return False
    return plan_of(problem).implementation == "mosaic" and why_not_warpgroups(problem) is None


def config_of(problem: Problem) -> ExpertsConfig:
    """The configuration of Triton's kernel: the plan's, or the rule's if it plans another.

    Raises UnsupportedError, with the reason, if the GPU can't multiply the format.
    """
    config = plan_of(problem).config
    return config if isinstance(config, ExpertsConfig) else config_by_rule(problem)


def warpgroup_config_of(problem: Problem) -> ExpertsWarpgroupConfig:
    """The warpgroups' configuration: the plan's, or the rule's if the plan has another kernel."""
    config = plan_of(problem).config
    return config if isinstance(config, ExpertsWarpgroupConfig) else warpgroups_by_rule(problem)


def joint_configs_of(
    first: Problem, second: Problem, *, planned: bool = True
) -> tuple[ExpertsWarpgroupConfig, ExpertsWarpgroupConfig] | None:
    """The configurations of two products of the same tiles, by warpgroups, or None.

    The first product, which has more outputs, decides the tiles. planned: whether the plans of both
    must be the warpgroups' kernel.
    """
    if planned and {plan_of(each).implementation for each in (first, second)} != {"mosaic"}:
        return None
    config, own = warpgroup_config_of(first), warpgroup_config_of(second)
    alike = [
        each
        for each in (own, *ranked(second))
        if each.tile_m == config.tile_m and why_unsound(each, second) is None
    ]
    return (config, alike[0]) if alike else None
