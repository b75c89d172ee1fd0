"""The plan of a product (`plan_of`), and the configuration of a kernel that is chosen already.

A caller may force a kernel that the plan does not name, or the planned one may be unable to run the
call. `triton_config_of` and `warpgroup_config_of` therefore give a configuration for any problem.
"""

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
    """Whether the warpgroups' kernel is planned and able to run, on the default device.

    Activations are taken to be bfloat16, unless the format rounds them to 8 bits.
    """
    if device.why_triton_cannot_run() is not None:
        return False
    return plan_of(problem).implementation == "mosaic" and why_not_warpgroups(problem) is None


def triton_config_of(problem: Problem) -> TritonConfig:
    """The configuration of Triton's kernel: the plan's, or the rule's if the plan has another.

    Raises UnsupportedError, with the reason, if the GPU can't multiply the format.
    """
    config = plan_of(problem).config
    return config if isinstance(config, TritonConfig) else triton_by_rule(problem)


def warpgroup_config_of(problem: Problem) -> WarpgroupConfig:
    """The warpgroups' configuration: the plan's, or the rule's if the plan has another kernel."""
    config = plan_of(problem).config
    return config if isinstance(config, WarpgroupConfig) else warpgroups_by_rule(problem)
