from __future__ import annotations

import concurrent.futures
import dataclasses
from typing import Any

import pytest

from mpjax.kernels.device import Limits
from mpjax.kernels.plans import tables
from mpjax.kernels.plans.plan import Entry, Plan
from mpjax.kernels.plans.planner import Planner, conditions
from mpjax.kernels.plans.tables import Tables

LIMITS = Limits(132, 9.0, "NVIDIA Test 1")
MEASURED, RULE, FORCED = Plan("measured"), Plan("rule"), Plan("forced")


@dataclasses.dataclass(frozen=True)
class Sum:
    """A problem of an operation that there is not."""

    size: int
    limits: Limits = LIMITS


class Sums(Tables[Sum]):
    """Plans of sums; those up to 8 share one."""

    operation = "sums"
    levels = 1
    configs = {"measured": None}  # noqa: RUF012

    def key_of(self, problem: Sum) -> tuple[int]:
        return (max(8, problem.size),)

    def names(self, key: tuple[int]) -> tuple[str, ...]:
        return (str(key[0]),)

    def key(self, names: tuple[str, ...]) -> tuple[int]:
        return (int(names[0]),)

    def check(self, key: tuple[int], implementation: str, config: Any) -> None:
        raise AssertionError("nothing has a configuration")

    def suits(self, problem: Sum, plan: Plan) -> bool:
        return problem.size != 5


class Others(Sums):
    operation = "others"


PLANNER, OTHER = (Planner(kind(), lambda problem: RULE) for kind in (Sums, Others))


@pytest.fixture(autouse=True)
def _table(tmp_path, monkeypatch):
    """A plan of sums was measured, up to the size 8."""
    monkeypatch.setattr(tables, "OPERATIONS", ("sums", "others"))
    monkeypatch.setenv("MPJAX_TUNED", str(tmp_path))
    path = tmp_path / tables.file_name(LIMITS.kind)
    PLANNER.measured.record(path, LIMITS.kind, {(8,): Entry(MEASURED, 1.0)}, {})
    yield
    tables.forget()


def test_a_measured_plan_goes_before_the_rule():
    assert PLANNER.plan_of(Sum(3)) == PLANNER.plan_of(Sum(8)) == MEASURED
    assert PLANNER.plan_of(Sum(9)) == RULE
    assert OTHER.plan_of(Sum(3)) == RULE


def test_a_measured_plan_that_does_not_suit_a_problem_is_not_used():
    assert PLANNER.plan_of(Sum(5)) == RULE
    assert PLANNER.plan_of(Sum(6)) == MEASURED


@pytest.mark.parametrize("kind", [None, "NVIDIA Test 2"])
def test_a_plan_was_measured_on_one_kind_of_gpu(kind):
    assert PLANNER.plan_of(Sum(3, Limits(132, 9.0, kind))) == RULE


def test_a_forced_plan_goes_before_everything():
    with PLANNER.forced(FORCED):
        assert PLANNER.plan_of(Sum(3)) == PLANNER.plan_of(Sum(9)) == FORCED
        with PLANNER.forced(RULE):
            assert PLANNER.plan_of(Sum(3)) == RULE
        with PLANNER.forced(None):
            assert PLANNER.plan_of(Sum(3)) == MEASURED
        with concurrent.futures.ThreadPoolExecutor(1) as other:
            assert other.submit(PLANNER.plan_of, Sum(3)).result() == MEASURED
        assert PLANNER.plan_of(Sum(3)) == FORCED
    assert PLANNER.plan_of(Sum(3)) == MEASURED


def test_operations_are_forced_apart():
    with PLANNER.forced(FORCED), OTHER.forced(Plan("another")):
        assert PLANNER.plan_of(Sum(3)) == FORCED
        with PLANNER.forced(None):
            assert OTHER.plan_of(Sum(3)) == Plan("another")
    assert OTHER.plan_of(Sum(3)) == RULE


def test_plans_depend_on_what_is_forced_and_on_the_tables(tmp_path, monkeypatch):
    seen = [conditions()]
    with PLANNER.forced(FORCED):
        seen.append(conditions())
        with OTHER.forced(FORCED):
            seen.append(conditions())
    assert conditions() == seen[0]
    tables.forget()
    seen.append(conditions())
    monkeypatch.setenv(tables.VARIABLE, str(tmp_path / "elsewhere"))
    seen.append(conditions())
    assert len(set(seen)) == 5
