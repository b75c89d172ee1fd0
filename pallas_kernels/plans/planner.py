"""Chooses the plan of a problem: a forced one, else a measured one, else the rule's.

In a batch-invariant context, it is the operation's batch-invariant plan unless it is forced.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Hashable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from mpjax.kernels.invariance import is_batch_invariant
from mpjax.kernels.plans import tables
from mpjax.kernels.plans.operation import Operation, Problem
from mpjax.kernels.plans.plan import Entry, Plan

_NOTHING: Mapping[str, Plan] = MappingProxyType({})
# Forced plans of this thread, by the name of the operation.
_forced = contextvars.ContextVar("forced plans", default=_NOTHING)


def plan_of(operation: Operation[Problem], problem: Problem) -> Plan:
    """The plan of a problem.

    A problem has only static values, so this can be called while tracing. Raises TableError for a
    damaged table.
    """
    if (forced := _forced.get().get(operation.name)) is not None:
        return forced
    if operation.invariant is not None and is_batch_invariant():
        return operation.invariant(problem)
    entry = measured(operation, problem)
    return operation.rule(problem) if entry is None else entry.plan


def measured(operation: Operation[Problem], problem: Problem) -> Entry | None:
    """The measured plan of a problem, from the first table with a plan that suits it, or None."""
    if (kind := problem.limits.kind) is None:
        return None
    key = operation.key_of(problem)
    for _, table in tables.in_use(operation, kind):
        entry = operation.find(table.entries, key)
        if entry is not None and operation.suits(problem, entry.plan):
            return entry
    return None


@contextlib.contextmanager
def forced(operation: Operation[Any], plan: Plan | None) -> Iterator[None]:
    """Makes `plan` the plan of every problem, in this thread while the context is open.

    None cancels an outer `forced`: each problem has its measured plan or the rule's.
    """
    others = {name: p for name, p in _forced.get().items() if name != operation.name}
    token = _forced.set(others if plan is None else {**others, operation.name: plan})
    try:
        yield
    finally:
        _forced.reset(token)


def conditions() -> Hashable:
    """A hashable value that changes whenever a plan may change: forced plans and tables.

    A cache of traced programs needs it in its keys.
    """
    return frozenset(_forced.get().items()), tables.generation()
