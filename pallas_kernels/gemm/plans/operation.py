"""Products as a planned operation, and the configurations of chosen kernels.

A caller may force a kernel that is not planned, or the planned kernel may be unable to run the
call. Therefore `triton_config_of` and `warpgroup_config_of` return a configuration for any problem.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from mpjax.kernels import device, plans
from mpjax.kernels.gemm.plans import limits
from mpjax.kernels.gemm.plans.candidates import candidates
from mpjax.kernels.gemm.plans.configuration import ROW_MULTIPLE, TritonConfig, WarpgroupConfig
from mpjax.kernels.gemm.plans.invariant_rule import invariant_plan
from mpjax.kernels.gemm.plans.problem import Problem
from mpjax.kernels.gemm.plans.rule import plan_by_rule
from mpjax.kernels.gemm.plans.triton_rule import triton_by_rule
from mpjax.kernels.gemm.plans.warpgroup_rule import warpgroups_by_rule, why_unsound
from mpjax.kernels.plans import Entry, Operation, Plan
from mpjax.kernels.product_format import ProductFormat

# The numbers of rows for which plans are measured. A problem with other rows uses the next larger
# bucket. Up to 32 rows there are two series: 8, 16 and 32 for multiples of ROW_MULTIPLE, and 7, 15
# and 31 for other numbers, which above ROW_MULTIPLE the warpgroup kernel pads. See `bucket`.
BUCKETS = (7, 8, 15, 16, 31, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class Key(NamedTuple):
    """The key of a measured plan.

    format: the weight format as a string. channels, outputs: K and N. rows: one of BUCKETS.
    """

    format: str
    channels: int
    outputs: int
    rows: int


def bucket(rows: int) -> int:
    """The bucket of a number of rows: the next of BUCKETS, or the last for more rows.

    Up to 32 rows, a multiple of ROW_MULTIPLE has the next bucket that is a multiple, too: 24 rows
    have the bucket 32, but 23 rows the bucket 31.
    """
    size = next((size for size in BUCKETS if rows <= size), BUCKETS[-1])
    return size + 1 if rows % ROW_MULTIPLE == 0 and size % ROW_MULTIPLE else size


def _exact(problem: Problem) -> Key:
    return Key(str(problem.format), problem.channels, problem.outputs, problem.rows)


def _bucketed(key: Key) -> Key:
    return key._replace(format=str(ProductFormat.of(key.format)), rows=bucket(key.rows))


def _find(entries: Mapping[Any, Entry], key: Key) -> Entry | None:
    """The measured entry for a key, or None.

    The buckets of 7, 15 and 31 rows fall back to the entry of 8, 16 and 32 rows, unless that entry
    selects the warpgroup kernel.
    """
    if key in entries or not key.rows % ROW_MULTIPLE:
        return entries.get(key)
    other = entries.get(key._replace(rows=key.rows + 1))
    return None if other is None or other.plan.implementation == "mosaic" else other


def _why_damaged(key: Key, plan: Plan) -> str | None:
    weight, config = ProductFormat.of(key.format).weight, plan.config
    if plan.implementation == "mosaic":
        return why_unsound(config, weight)
    if reason := config.why_not():
        return str(reason)
    if config.width is not None and weight.plane_width % config.width:
        return f"width is {config.width}, expected a divisor of {weight.plane_width}"
    return None


def _suits(problem: Problem, plan: Plan) -> bool:
    if plan.implementation == "triton":
        return limits.why_unsound(plan.config, problem) is None
    if plan.implementation == "mosaic":
        return limits.why_not_warpgroups(problem) is None
    is_plain_product = problem.weight.is_flat and problem.weight.group_size is None
    return plan.implementation != "xla" or is_plain_product


OPERATION = Operation[Problem](
    name="gemm",
    keys=Key,
    # uint4:g128 (W4A16) or liquid4:g64/int8 (W4A8), 4096x24576, 64
    levels=("{format}", "{channels}x{outputs}", "{rows}"),
    configs={"triton": TritonConfig, "mosaic": WarpgroupConfig, "dequantize": None, "xla": None},
    exact=_exact,
    bucketed=_bucketed,
    rule=plan_by_rule,
    candidates=candidates,
    suits=_suits,
    why_damaged=_why_damaged,
    find=_find,
    invariant=invariant_plan,
)
plan_of = functools.partial(plans.plan_of, OPERATION)
forced = functools.partial(plans.forced, OPERATION)


def runs_by_warpgroups(problem: Problem) -> bool:
    """Whether the warpgroup kernel is planned and able to run, on the default device.

    Activations are assumed to be bfloat16, unless the format rounds them to 8 bits.
    """
    if device.why_triton_cannot_run() is not None:
        return False
    is_planned = plan_of(problem).implementation == "mosaic"
    return is_planned and limits.why_not_warpgroups(problem) is None


def triton_config_of(problem: Problem) -> TritonConfig:
    """The configuration of Triton's kernel: the plan's, or the rule's if another kernel is planned.

    Raises UnsupportedError, with the reason, if the GPU can't multiply the format.
    """
    config = plan_of(problem).config
    return config if isinstance(config, TritonConfig) else triton_by_rule(problem)


def warpgroup_config_of(problem: Problem) -> WarpgroupConfig:
    """The warpgroups' configuration: the plan's, or the rule's if another kernel is planned."""
    config = plan_of(problem).config
    return config if isinstance(config, WarpgroupConfig) else warpgroups_by_rule(problem)
