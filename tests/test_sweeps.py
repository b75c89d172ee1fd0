from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from tests.sweeps import combinations, covering, is_asked_for, sampled

SIZES = [(2, 2, 2), (4, 3, 2), (3, 5, 3, 2), (6, 2)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("covered", [1, 2])
def test_all_values_of_any_places_are_covered(sizes, covered):
    product = list(itertools.product(*map(range, sizes)))
    chosen = [product[number] for number in covering(product, covered)]
    for places in itertools.combinations(range(len(sizes)), covered):
        found = {tuple(values[place] for place in places) for values in chosen}
        assert found == set(itertools.product(*(range(sizes[place]) for place in places)))


def test_the_others_are_marked():
    mark = combinations(1, first=[[1], [2]], second=["a", ("b", 3)]).mark
    names, cases = mark.args
    assert names == ("first", "second")
    assert cases[0] == ([1], "a")
    assert [[mark.name for mark in case.marks] for case in cases[1:3]] == [["sweep"], ["sweep"]]
    assert cases[3] == ([2], ("b", 3))
    assert mark.kwargs["ids"] == ["[1]-a", "[1]-b-3", "[2]-a", "[2]-b-3"]


@pytest.mark.parametrize(
    ("expression", "argument", "expected"),
    [
        ("fuzz", "tests", False),
        ("", "tests", False),
        ("not slow", "tests/test_sweeps.py", False),
        ("sweep", "tests", True),
        ("", "tests/test_sweeps.py::test_few_are_chosen", True),
    ],
)
def test_sweeps_run_where_they_are_asked_for(expression, argument, expected):
    config: Any = SimpleNamespace(args=[argument], option=SimpleNamespace(markexpr=expression))
    assert is_asked_for(config) == expected


def test_one_of_so_many_cases_runs_and_one_at_least():
    names = [f"one[{outer}-{inner}]" for outer in range(4) for inner in range(3)]
    names += ["two[0]", "two[1]", *(f"seven[{number}]" for number in range(7))]
    left_out = sampled(names, [3] * 12 + [5] * 2 + [2] * 7)
    running = [name for index, name in enumerate(names) if index not in left_out]
    tests = Counter(name.partition("[")[0] for name in running)
    assert tests["one"] == 4
    assert tests["two"] == 1
    assert tests["seven"] in (3, 4)
    assert {name[-2] for name in running if name.startswith("one")} == {"0", "1", "2"}
    # Other tests beside it change nothing.
    assert {index + 12 for index in sampled(names[12:], [5] * 2 + [2] * 7)} == left_out - {
        *range(12)
    }


@pytest.mark.one_of(4)
@pytest.mark.parametrize("case", range(8))
def test_cases_of_a_sample_are_left_out(case, request):
    cases = [item for item in request.session.items if item.function is request.function]
    assert len(cases) <= 2 or is_asked_for(request.config)  # the second Python runs fewer
