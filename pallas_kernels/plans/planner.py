"""Chooses the plan of an operation: a forced one, else a measured one, else the rule's."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

from mpjax.kernels.device import Limits
from mpjax.kernels.plans import tables
from mpjax.kernels.plans.plan import Plan

_NOTHING: Mapping[str, Plan] = MappingProxyType({})
# Forced plans of this thread, by the name of the operation.
_forced = contextvars.ContextVar("forced plans", default=_NOTHING)


class OnGpu(Protocol):
    """A problem of any operation: it has the limits of the GPU that it is planned for."""

    @property
    def limits(self) -> Limits:
        """The limits of the GPU."""


Problem = TypeVar("Problem", bound=OnGpu)


class Planner(Generic[Problem]):
    """The planner of one operation.

    measured: the operation's tables of measured plans. rule: gives a plan for any problem.
    """

    def __init__(self, measured: tables.Tables[Problem], rule: Callable[[Problem], Plan]) -> None:
        self.measured, self.rule = measured, rule

    def plan_of(self, problem: Problem) -> Plan:
        """The plan of a problem.

        A problem has static values only, so that this can be called while tracing. Raises
        TableError for a damaged table.
        """
        if (forced := _forced.get().get(self.measured.operation)) is not None:
            return forced
        kind = problem.limits.kind
        if kind is not None:
            suits = functools.partial(self.measured.suits, problem)
            entry = self.measured.look_up(kind, self.measured.key_of(problem), suits)
            if entry is not None:
                return entry.plan
        return self.rule(problem)

    @contextlib.contextmanager
    def forced(self, plan: Plan | None) -> Iterator[None]:
        """Makes `plan` the plan of every problem, in this thread while the context is open.

        None cancels an outer `forced`: each problem has its measured plan or the rule's.
        """
        others = {name: p for name, p in _forced.get().items() if name != self.measured.operation}
        token = _forced.set(others if plan is None else {**others, self.measured.operation: plan})
        try:
            yield
        finally:
            _forced.reset(token)


def conditions() -> Hashable:
    """A hashable value that changes whenever the plan of a problem may: forced plans and tables.

    A cache of traced programs needs it in its keys.
    """
    return frozenset(_forced.get().items()), tables.generation()
