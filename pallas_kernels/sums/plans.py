"""Whether a sum over devices is the kernel's: by tables of what was measured, else XLA's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

from mpjax.kernels import plans
from mpjax.kernels.device import Limits
from mpjax.kernels.plans import Operation, Plan

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


class Sums(Operation[Problem]):
    """The sums over devices, by the number of devices and by KiB; see `mpjax bench sums`."""

    name = "sums"
    keys = Key
    levels = ("{devices}", "{kibibytes}")
    configs: Mapping[str, type | None] = {"mosaic": None, "reference": None}

    def exact(self, problem: Problem) -> Key:
        """See Operation."""
        return Key(problem.devices, max(-(-problem.nbytes // 1024), 1))

    def bucketed(self, key: Key) -> Key:
        """See Operation."""
        return key._replace(kibibytes=1 << (key.kibibytes - 1).bit_length())

    def rule(self, problem: Problem) -> Plan:
        """XLA's sum, which is the default until another is measured to be faster."""
        return Plan("reference")


OPERATION = Sums()
plan_of = functools.partial(plans.plan_of, OPERATION)
forced = functools.partial(plans.forced, OPERATION)
