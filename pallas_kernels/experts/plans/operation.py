"""Grouped products as a planned operation, and the configurations of chosen kernels."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from mpjax.kernels import device, plans
from mpjax.kernels.experts.plans.candidates import can_run, candidates
from mpjax.kernels.experts.plans.configuration import ExpertsConfig, ExpertsWarpgroupConfig
from mpjax.kernels.experts.plans.problem import Problem
from mpjax.kernels.experts.plans.rule import (
    config_by_rule,
    invariant_plan,
    plan_by_rule,
    warpgroups_by_rule,
)
from mpjax.kernels.experts.plans.warpgroup_rule import (
    ranked,
    why_not_warpgroups,
    why_unsound,
)
from mpjax.kernels.plans import Operation, Plan
from mpjax.kernels.product_format import ProductFormat


class Key(NamedTuple):
    """The key of a measured plan: the fields of its Problem, with a bucket of the tokens."""

    format: str
    per_token: int
    experts: int
    channels: int
    outputs: int
    gated: bool
    tokens: int


def bucket(tokens: int) -> int:
    """The bucket of a number of tokens: the next power of two."""
    return 1 << max(0, tokens - 1).bit_length()


def _exact(problem: Problem) -> Key:
    fields = {name: getattr(problem, name) for name in Key._fields}
    return Key(**fields | {"format": str(problem.format)})


def _bucketed(key: Key) -> Key:
    return key._replace(format=str(ProductFormat.of(key.format)), tokens=bucket(key.tokens))


def _why_damaged(key: Key, plan: Plan) -> str | None:
    config: Any = plan.config
    return config.why_not() if plan.implementation == "triton" else None


OPERATION = Operation[Problem](
    name="experts",
    keys=Key,
    # A shape, such as `8/128 of 2048x1536 gated`, has a token's experts, all experts, and K and N
    # of each.
    levels=(
        "{format}",
        "{per_token}/{experts} of {channels}x{outputs}{gated: gated}",
        "{tokens}",
    ),
    configs={"triton": ExpertsConfig, "mosaic": ExpertsWarpgroupConfig},
    exact=_exact,
    bucketed=_bucketed,
    rule=plan_by_rule,
    candidates=candidates,
    suits=can_run,
    why_damaged=_why_damaged,
    invariant=invariant_plan,
)
plan_of = functools.partial(plans.plan_of, OPERATION)
forced = functools.partial(plans.forced, OPERATION)


def runs_by_warpgroups(problem: Problem) -> bool:
    """Whether the warpgroup kernel is planned and able to run, on the default device.

    Activations are assumed to have the weight's dtype, or bfloat16.
    """
    if device.why_triton_cannot_run() is not None:
        return False
    return plan_of(problem).implementation == "mosaic" and why_not_warpgroups(problem) is None


def config_of(problem: Problem) -> ExpertsConfig:
    """The configuration of Triton's kernel: the plan's, or the rule's if another kernel is planned.

    Raises UnsupportedError, with the reason, if the GPU can't multiply the format.
    """
    config = plan_of(problem).config
    return config if isinstance(config, ExpertsConfig) else config_by_rule(problem)


def warpgroup_config_of(problem: Problem) -> ExpertsWarpgroupConfig:
    """The warpgroups' configuration: the plan's, or the rule's if another kernel is planned."""
    config = plan_of(problem).config
    return config if isinstance(config, ExpertsWarpgroupConfig) else warpgroups_by_rule(problem)


def joint_configs_of(
    first: Problem, second: Problem, *, planned: bool = True
) -> tuple[ExpertsWarpgroupConfig, ExpertsWarpgroupConfig] | None:
    """The configurations of two products by warpgroups that share their tiles, or None.

    The first product, which has more outputs, decides the tiles. planned: whether both plans must
    be the warpgroup kernel.
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
