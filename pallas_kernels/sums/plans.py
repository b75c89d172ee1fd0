"""Whether a sum over devices is the kernel's: by tables of what was measured, else XLA's."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from mpjax.kernels.device import Limits
from mpjax.kernels.plans.plan import Plan
from mpjax.kernels.plans.planner import Planner
from mpjax.kernels.plans.tables import Tables

LEAST_BLOCK, MOST_BLOCK = 512, 8192  # numbers of a kernel's program: 4 to 64 of each thread
# Of a device, which all run at the same time, since each waits for the same program elsewhere.
MOST_PROGRAMS = 64
MOST_BYTES = MOST_PROGRAMS * MOST_BLOCK * 4  # of float32


@dataclasses.dataclass(frozen=True)
class Problem:
    """A sum of `nbytes` bytes of each of some devices, whose GPUs have some limits."""

    devices: int
    nbytes: int
    limits: Limits


class Key(NamedTuple):
    """The key of a plan: the number of devices, and KiB rounded up to a power of two."""

    devices: int
    kibibytes: int


class SumTables(Tables[Problem]):
    """The tables of measured sums, by the number of devices and by KiB; see `mpjax bench sums`."""

    operation = "sums"
    levels = 2
    configs: Mapping[str, type | None] = {"mosaic": None, "reference": None}

    def key_of(self, problem: Problem) -> Key:
        """The key of a problem."""
        kibibytes = max(-(-problem.nbytes // 1024), 1)
        return Key(problem.devices, 1 << (kibibytes - 1).bit_length())

    def names(self, key: Key) -> tuple[str, ...]:
        """The names of a key, such as `2`, `32`."""
        return str(key.devices), str(key.kibibytes)

    def key(self, names: tuple[str, ...]) -> Key:
        """The inverse of `names`. Raises ValueError for names that `names` does not give."""
        for name in names:
            if re.fullmatch(r"[1-9]\d*", name) is None:
                raise ValueError(f"{' '.join(names)}: {name!r} is not a positive whole number")
        devices, kibibytes = map(int, names)
        if kibibytes & (kibibytes - 1):
            raise ValueError(f"{' '.join(names)}: {kibibytes} KiB is no power of two")
        return Key(devices, kibibytes)

    def check(self, key: Key, implementation: str, config: Mapping[str, Any]) -> None:
        """Nothing to check: sums have no configuration."""


def plan_by_rule(problem: Problem) -> Plan:
    """XLA's sum, which is the default until another is measured to be faster."""
    return Plan("reference")


TABLES = SumTables()
PLANNER = Planner(TABLES, plan_by_rule)
plan_of, forced = PLANNER.plan_of, PLANNER.forced
