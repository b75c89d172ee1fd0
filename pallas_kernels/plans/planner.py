"""Which plan an operation runs with: one that is forced, else a measured one, else the rule's."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Hashable, Iterator, Mapping
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

from mpjax.kernels.device import Limits
from mpjax.kernels.plans import tables
from mpjax.kernels.plans.plan import Plan

_NOTHING: Mapping[str, Plan] = MappingProxyType({})
# Plans that are forced in this thread, by the name of the operation.
_forced = contextvars.ContextVar("forced plans", default=_NOTHING)


class OnGpu(Protocol):
    """A problem: what is to be computed on a GPU with these limits."""

    @property
    def limits(self) -> Limits:
        """The limits of the GPU."""


Problem = TypeVar("Problem", bound=OnGpu)


class Planner(Generic[Problem]):
    """The planner of one operation.

    measured: the operation's tables. rule: plans any problem without a measurement.
    """

    def __init__(self, measured: tables.Tables[Problem], rule: Callable[[Problem], Plan]) -> None:
        self.measured, self.rule = measured, rule

    def plan_of(self, problem: Problem) -> Plan:
        """The plan of a problem.

        Only looks at static values, so that it can be called while tracing. Raises TableError for a
        damaged table.
        """
        if (forced := _forced.get().get(self.measured.operation)) is not None:
            return forced
        kind = problem.limits.kind
        if kind is not None:
            entry = self.measured.look_up(kind, self.measured.key_of(problem))
            if entry is not None and self.measured.suits(problem, entry.plan):
                return entry.plan
        return self.rule(problem)

    @contextlib.contextmanager
    def forced(self, plan: Plan | None) -> Iterator[None]:
        """Inside, in this thread, `plan` is the plan of every problem.

        None: each problem has the plan again that it has outside of all `forced`.
        """
        others = {name: p for name, p in _forced.get().items() if name != self.measured.operation}
        token = _forced.set(others if plan is None else {**others, self.measured.operation: plan})
        try:
            yield
        finally:
            _forced.reset(token)


def conditions() -> Hashable:
    """What plans depend on besides their problems: for the key of whoever keeps traced programs."""
    return frozenset(_forced.get().items()), tables.reading()
