"""Whether a sum over devices is computed by the kernel or by XLA: a planned operation."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

from mpjax.kernels import plans
from mpjax.kernels.device import Limits
from mpjax.kernels.plans import Operation, Plan
from mpjax.kernels.sums.layout import MOST_BYTES


@dataclasses.dataclass(frozen=True)
class Problem:
    """A sum to plan: the number of devices, the bytes of x on each, and the limits of the GPUs."""

    devices: int
    nbytes: int
    limits: Limits


class Key(NamedTuple):
    """The key of a measured plan: the number of devices, and KiB rounded up to a power of two."""

    devices: int
    kibibytes: int


def plan_by_rule(problem: Problem) -> Plan:
    """XLA's sum, unless the kernel was measured to be faster."""
    return Plan("reference")


def _exact(problem: Problem) -> Key:
    return Key(problem.devices, max(-(-problem.nbytes // 1024), 1))


def _bucketed(key: Key) -> Key:
    return key._replace(kibibytes=1 << (key.kibibytes - 1).bit_length())


def _candidates(problem: Problem, count: int) -> list[Plan]:
    return [Plan(name) for name in OPERATION.configs][:count]


def _suits(problem: Problem, plan: Plan) -> bool:
    return plan.implementation == "reference" or problem.nbytes <= MOST_BYTES


def _why_damaged(key: Any, plan: Plan) -> str | None:
    return None


OPERATION = Operation[Problem](
    name="sums",
    keys=Key,
    levels=("{devices} devices", "{kibibytes} KiB"),
    configs={"mosaic": None, "reference": None},
    exact=_exact,
    bucketed=_bucketed,
    rule=plan_by_rule,
    candidates=_candidates,
    suits=_suits,
    why_damaged=_why_damaged,
    invariant=plan_by_rule,
)
plan_of = functools.partial(plans.plan_of, OPERATION)
forced = functools.partial(plans.forced, OPERATION)
