"""An operation that there is not, whose problems are sizes of sums."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from mpjax.kernels.device import Limits
from mpjax.kernels.plans import Operation
from mpjax.kernels.plans.plan import Plan

LIMITS = Limits(132, 9.0, "NVIDIA Test 1")
RULE = Plan("plain")


@dataclasses.dataclass(frozen=True)
class Tile:
    """The configuration of the implementation `tiled`."""

    size: int
    stages: int = 2


@dataclasses.dataclass(frozen=True)
class Sum:
    """A problem."""

    size: int
    limits: Limits = LIMITS


class Key(NamedTuple):
    """The key of a sum."""

    size: int


def _why_damaged(key: Key, plan: Plan) -> str | None:
    size = plan.config.size if isinstance(plan.config, Tile) else 0
    return f"size is {size}, more than {key.size}" if size > key.size else None


# Sums up to 8 share a plan, but for 5.
SUMS = Operation[Sum](
    name="sums",
    keys=Key,
    levels=("of {size}",),
    configs={"tiled": Tile, "plain": None, "measured": None},
    exact=lambda problem: Key(problem.size),
    bucketed=lambda key: Key(max(8, key.size)),
    rule=lambda problem: RULE,
    candidates=lambda problem, most: [RULE],
    suits=lambda problem, plan: problem.size != 5,
    why_damaged=_why_damaged,
)
OTHERS = dataclasses.replace(SUMS, name="others")
