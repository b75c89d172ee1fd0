"""A plan, and an entry of a table: a plan with its measured time."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple


@dataclasses.dataclass(frozen=True)
class Plan:
    """An implementation of an operation, and its configuration.

    implementation: its name, as in the operation's argument `implementation`.
    config: the parameters of its kernel's launch, a frozen dataclass; None if it has none.
    """

    implementation: str
    config: Any = None


class Entry(NamedTuple):
    """The fastest measured plan of a problem, and the time of one call with it."""

    plan: Plan
    microseconds: float
