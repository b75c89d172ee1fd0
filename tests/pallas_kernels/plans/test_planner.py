from __future__ import annotations

import concurrent.futures

import pytest

from mpjax.kernels.device import Limits
from mpjax.kernels.plans import tables
from mpjax.kernels.plans.plan import Entry, Plan
from mpjax.kernels.plans.planner import conditions, forced, measured, plan_of
from tests.pallas_kernels.plans.sums import LIMITS, OTHERS, RULE, SUMS, Key, Sum

MEASURED, FORCED = Plan("measured"), Plan("forced")


@pytest.fixture(autouse=True)
def _table(tmp_path, monkeypatch):
    """A plan of sums was measured, up to the size 8."""
    monkeypatch.setattr(tables, "OPERATIONS", ("sums", "others"))
    monkeypatch.setenv("MPJAX_TUNED", str(tmp_path))
    path = tmp_path / tables.file_name(LIMITS.kind)
    tables.record(SUMS, path, LIMITS.kind, {Key(8): Entry(MEASURED, 1.0)}, {})
    yield
    tables.forget()


def test_a_measured_plan_goes_before_the_rule():
    assert plan_of(SUMS, Sum(3)) == plan_of(SUMS, Sum(8)) == MEASURED
    assert plan_of(SUMS, Sum(9)) == RULE
    assert plan_of(OTHERS, Sum(3)) == RULE
    assert measured(SUMS, Sum(3)) == Entry(MEASURED, 1.0)
    assert measured(SUMS, Sum(9)) is None


def test_a_measured_plan_that_does_not_suit_a_problem_is_not_used():
    assert plan_of(SUMS, Sum(5)) == RULE
    assert plan_of(SUMS, Sum(6)) == MEASURED


@pytest.mark.parametrize("kind", [None, "NVIDIA Test 2"])
def test_a_plan_was_measured_on_one_kind_of_gpu(kind):
    assert plan_of(SUMS, Sum(3, Limits(132, 9.0, kind))) == RULE


def test_a_forced_plan_goes_before_everything():
    with forced(SUMS, FORCED):
        assert plan_of(SUMS, Sum(3)) == plan_of(SUMS, Sum(9)) == FORCED
        with forced(SUMS, RULE):
            assert plan_of(SUMS, Sum(3)) == RULE
        with forced(SUMS, None):
            assert plan_of(SUMS, Sum(3)) == MEASURED
        with concurrent.futures.ThreadPoolExecutor(1) as other:
            assert other.submit(plan_of, SUMS, Sum(3)).result() == MEASURED
        assert plan_of(SUMS, Sum(3)) == FORCED
    assert plan_of(SUMS, Sum(3)) == MEASURED


def test_operations_are_forced_apart():
    with forced(SUMS, FORCED), forced(OTHERS, Plan("another")):
        assert plan_of(SUMS, Sum(3)) == FORCED
        with forced(SUMS, None):
            assert plan_of(OTHERS, Sum(3)) == Plan("another")
    assert plan_of(OTHERS, Sum(3)) == RULE


def test_plans_depend_on_what_is_forced_and_on_the_tables(tmp_path, monkeypatch):
    seen = [conditions()]
    with forced(SUMS, FORCED):
        seen.append(conditions())
        with forced(OTHERS, FORCED):
            seen.append(conditions())
    assert conditions() == seen[0]
    tables.forget()
    seen.append(conditions())
    monkeypatch.setenv(tables.VARIABLE, str(tmp_path / "elsewhere"))
    seen.append(conditions())
    assert len(set(seen)) == 5
