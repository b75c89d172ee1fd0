"""An operation whose problems are planned: its rule, its candidates, and the keys of its plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from mpjax.kernels.device import Limits
from mpjax.kernels.plans import names
from mpjax.kernels.plans.plan import Entry, Plan


class OnGpu(Protocol):
    """A problem of any operation, with the limits of the GPU for which it is planned."""

    @property
    def limits(self) -> Limits:
        """The limits of the GPU."""


Problem = TypeVar("Problem", bound=OnGpu)


@dataclasses.dataclass(frozen=True, eq=False)
class Operation(Generic[Problem]):
    """How the problems of one operation are planned.

    name: of the operation, and of its section in a table.
    keys: the type of the keys of measured plans, a NamedTuple of strings, integers and bools.
    levels: the names of a key in the section, from outside in, as templates (`plans.names`).
    configs: name of an implementation → dataclass of its configurations, or None.
    exact: returns the key with a problem's own sizes.
    bucketed: returns the key whose plan a key's problems share: sizes are rounded up to buckets,
        and formats are written as in tables. Raises ValueError for an unknown format.
    rule: returns the plan of a problem without a measured plan.
    candidates: returns plans of a problem to measure, at most the given number, the most promising
        first.
    suits: whether a problem can run with a plan that was measured for its key.
    why_damaged: the reason why no problem of a key can run with a plan whose fields have the right
        types, or None.
    find: returns the entry of a table that a key's problems use, or None.
    invariant: returns the plan of a problem in a batch-invariant context. Plans of problems that
        differ only in the number of rows, sequences or tokens must add in the same order.
    """

    name: str
    keys: type[Any]
    levels: tuple[str, ...]
    configs: Mapping[str, type | None]
    exact: Callable[[Problem], Any]
    bucketed: Callable[[Any], Any]
    rule: Callable[[Problem], Plan]
    candidates: Callable[[Problem, int], list[Plan]]
    suits: Callable[[Problem, Plan], bool]
    why_damaged: Callable[[Any, Plan], str | None]
    find: Callable[[Mapping[Any, Entry], Any], Entry | None] = lambda entries, key: entries.get(key)
    invariant: Callable[[Problem], Plan] | None = None

    def key_of(self, problem: Problem) -> Any:
        """The key of a problem; problems that share a plan have the same key."""
        return self.bucketed(self.exact(problem))

    def names_of(self, key: Any) -> tuple[str, ...]:
        """The names of a key in a table, one for each level."""
        return tuple(names.write(level, key) for level in self.levels)

    def key(self, found: tuple[str, ...]) -> Any:
        """The inverse of `names_of`. Raises ValueError for names that no key has."""
        fields = [names.read(*pair, self.keys) for pair in zip(self.levels, found, strict=True)]
        key = self.keys(**{name: value for read in fields for name, value in read.items()})
        if (expected := self.names_of(self.bucketed(key))) != found:
            raise ValueError(f"{' '.join(found)}: in a table this is {' '.join(expected)}")
        return key
