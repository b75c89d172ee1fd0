"""Plans of grouped products: from a `Problem`, the kernel and its tiles."""

from mpjax.kernels.experts.plans.configuration import (
    PLAIN_CHANNELS,
    ExpertsConfig,
    ExpertsWarpgroupConfig,
)
from mpjax.kernels.experts.plans.operation import (
    OPERATION,
    Key,
    bucket,
    config_of,
    forced,
    joint_configs_of,
    plan_of,
    runs_by_warpgroups,
    warpgroup_config_of,
)
from mpjax.kernels.experts.plans.problem import Problem
from mpjax.kernels.experts.plans.rule import plan_by_rule
from mpjax.kernels.experts.plans.warpgroup_rule import MOST_TILE_ROWS, why_not_warpgroups

__all__ = [
    "MOST_TILE_ROWS",
    "OPERATION",
    "PLAIN_CHANNELS",
    "ExpertsConfig",
    "ExpertsWarpgroupConfig",
    "Key",
    "Problem",
    "bucket",
    "config_of",
    "forced",
    "joint_configs_of",
    "plan_by_rule",
    "plan_of",
    "runs_by_warpgroups",
    "warpgroup_config_of",
    "why_not_warpgroups",
]
