"""Plans of products: from a `Problem`, the implementation and its tiles.

`plan_of` looks a problem up in the tables of plans that were measured on this kind of GPU
(`operation`). Without an entry, the rule decides: `rule` chooses the implementation, `triton_rule`
and `warpgroup_rule` the tiles, the latter with a `cost_model`. `limits` and `shared_memory` define
which configurations a GPU can run.
"""

from mpjax.kernels.gemm.plans.configuration import (
    FEW_ROWS,
    SCALINGS,
    Implementation,
    TritonConfig,
    WarpgroupConfig,
)
from mpjax.kernels.gemm.plans.cost_model import microseconds
from mpjax.kernels.gemm.plans.invariant_rule import invariant_plan
from mpjax.kernels.gemm.plans.limits import (
    can_be_operand,
    why_no_wgmma,
    why_not_warpgroups,
    why_unsound,
)
from mpjax.kernels.gemm.plans.operation import (
    BUCKETS,
    OPERATION,
    Key,
    bucket,
    forced,
    plan_of,
    runs_by_warpgroups,
    triton_config_of,
    warpgroup_config_of,
)
from mpjax.kernels.gemm.plans.problem import Problem
from mpjax.kernels.gemm.plans.rule import plan_by_rule
from mpjax.kernels.gemm.plans.triton_rule import triton_by_rule
from mpjax.kernels.gemm.plans.warpgroup_rule import why_unsound as why_unsound_warpgroups
from mpjax.kernels.plans import Entry, Plan

__all__ = [
    "BUCKETS",
    "FEW_ROWS",
    "OPERATION",
    "SCALINGS",
    "Entry",
    "Implementation",
    "Key",
    "Plan",
    "Problem",
    "TritonConfig",
    "WarpgroupConfig",
    "bucket",
    "can_be_operand",
    "forced",
    "invariant_plan",
    "microseconds",
    "plan_by_rule",
    "plan_of",
    "runs_by_warpgroups",
    "triton_by_rule",
    "triton_config_of",
    "warpgroup_config_of",
    "why_no_wgmma",
    "why_not_warpgroups",
    "why_unsound",
    "why_unsound_warpgroups",
]
