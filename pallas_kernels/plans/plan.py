"""A plan, and how fast it was."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple


@dataclasses.dataclass(frozen=True)
class Plan:
    """An implementation of an operation, by the name that `implementation=` has for it.

    config: what its kernel is launched with, a frozen dataclass; None where it has no choice.
    """

    implementation: str
    config: Any = None


class Entry(NamedTuple):
    """The fastest plan that was measured for a problem, and the time of one call with it."""

    plan: Plan
    microseconds: float
