"""Products of parameters, of which only a part runs by default, and the rest with `-m sweep`.

`tests/conftest.py` leaves out what is marked unless it is asked for.
"""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

# Marks of tests that are left out unless they are asked for.
LEFT_OUT = ("sweep", "fuzz", "install")


def is_asked_for(config: pytest.Config, mark: str = "sweep") -> bool:
    """Whether such tests run: an expression of marks names them, or an argument names a test."""
    named = any("::" in argument for argument in config.args)
    return named or mark in config.option.markexpr


def in_sweep(*values: Any) -> Any:
    """A case of `parametrize` that runs with `-m sweep` alone."""
    return pytest.param(*values, marks=pytest.mark.sweep)


def in_fuzz(*values: Any) -> Any:
    """A case of `parametrize` with minutes of random input, which runs with `-m fuzz` alone."""
    return pytest.param(*values, marks=pytest.mark.fuzz)


def combinations(covered: int = 2, **values: Sequence[Any]) -> pytest.MarkDecorator:
    """`parametrize` with all combinations of the values of some parameters.

    By default as few run as have all values of any `covered` parameters together: all pairs, or
    with 1 each value once. The others are marked `sweep`.
    """
    product = list(itertools.product(*values.values()))
    chosen = covering(product, covered)
    cases = [c if number in chosen else in_sweep(*c) for number, c in enumerate(product)]
    return pytest.mark.parametrize(
        tuple(values), cases, ids=["-".join(map(_name, c)) for c in product]
    )


def sampled(names: Sequence[str], counts: Sequence[int]) -> set[int]:
    """The indices of cases that a sample leaves out.

    One in `counts[i]` cases of a test runs, and one at least. Which they are depends on the test's
    name and the order of its cases. They are not all of one value of a parameter with as many
    values.

    Args:
        names: of all cases, each `test[values]`, in order.
        counts: of each case, that of its test.
    """
    tests: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        tests.setdefault(name.partition("[")[0], []).append(index)
    return {
        index
        for test, cases in tests.items()
        for place, index in enumerate(cases)
        if (place + place // counts[index] + zlib.crc32(test.encode()))
        % min(counts[index], len(cases))
    }


def _name(value: Any) -> str:
    """A part of a test's name: a shape's own, and of a tuple those of its members."""
    if hasattr(value, "name"):
        return str(value.name)
    return "-".join(map(_name, value)) if isinstance(value, tuple) else str(value)


def covering(product: Sequence[Sequence[Any]], covered: int) -> set[int]:
    """Indices of combinations with all values that `covered` places have in any of the product.

    The next is always one that has the most that no other had. With 1 it is, of these, one whose
    values the others have the least, so that a parameter of few values has each about as often.
    """
    has = [set(_parts(combination, covered)) for combination in product]
    values = [set(_parts(combination, 1)) for combination in product]
    missing, chosen, used = set().union(*has), set(), Counter()

    def worth(number: int) -> tuple[int, int]:
        repeated = sum(used[value] for value in values[number]) if covered == 1 else 0
        return len(has[number] & missing), -repeated

    while missing:
        best = max(range(len(has)), key=worth)
        chosen.add(best)
        missing -= has[best]
        used.update(values[best])
    return chosen


def _parts(combination: Sequence[Any], covered: int) -> Iterable[Any]:
    # Values such as lists can't be in a set: their texts can.
    return itertools.combinations(enumerate(map(repr, combination)), covered)
