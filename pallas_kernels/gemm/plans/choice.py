"""The planner of products, and configurations for a kernel that the caller requests."""

from __future__ import annotations

from mpjax.kernels import device
from mpjax.kernels.gemm.plans.configuration import TritonConfig, WarpgroupConfig
from mpjax.kernels.gemm.plans.limits import why_not_warpgroups
from mpjax.kernels.gemm.plans.problem import Problem
from mpjax.kernels.gemm.plans.rule import plan_by_rule
from mpjax.kernels.gemm.plans.tables import TABLES
from mpjax.kernels.gemm.plans.triton_rule import triton_by_rule
from mpjax.kernels.gemm.plans.warpgroup_rule import warpgroups_by_rule
from mpjax.kernels.plans.planner import Planner

PLANNER = Planner(TABLES, plan_by_rule)
plan_of, forced = PLANNER.plan_of, PLANNER.forced


def runs_by_warpgroups(problem: Problem) -> bool:
    """Whether the warpgroups' kernel multiplies a problem on the default device, for bfloat16 x."""
    if device.why_triton_cannot_run() is not None:
        return False
    return plan_of(problem).implementation == "mosaic" and why_not_warpgroups(problem) is None


def triton_config_of(problem: Problem) -> TritonConfig:
    """The configuration of Triton's kernel: the plan's, or the rule's if it plans another kernel.

    Raises UnsupportedError, with the reason, if the GPU can't multiply the format.
    """
    config = plan_of(problem).config
    return config if isinstance(config, TritonConfig) else triton_by_rule(problem)


def warpgroup_config_of(problem: Problem) -> WarpgroupConfig:
    """The warpgroups' configuration: the plan's, or the rule's if it plans another kernel."""
    config = plan_of(problem).config
    return config if isinstance(config, WarpgroupConfig) else warpgroups_by_rule(problem)
