from __future__ import annotations

import pytest

from mpjax.engine.clock import Clock

pytestmark = pytest.mark.any_version


@pytest.fixture
def at():
    """A clock whose time is set by hand: `at(seconds)` returns it."""
    times = [0.0]
    clock = Clock(lambda: times[0])

    def set_(seconds):
        times[0] = seconds
        return clock

    return set_


def test_a_program_that_waits_for_another_begins_when_that_ends(at):
    first = at(10.0).start(is_free=True)
    second = at(10.5).start(is_free=False)
    assert at(12.0).end(first) == (10.0, 2.0)
    assert at(15.0).end(second) == (12.0, 3.0)
    assert (at(15.0).work_seconds, at(15.0).idle_seconds) == (5.0, 0.0)


def test_the_device_waits_from_the_results_before(at):
    first = at(10.0).start(is_free=True)
    at(12.0).end(first)
    second = at(12.5).start(is_free=True)
    assert at(14.0).end(second) == (12.5, 1.5)
    assert (at(14.0).work_seconds, at(14.0).idle_seconds) == (4.0, 0.5)


def test_time_without_requests_is_no_work(at):
    first = at(10.0).start(is_free=True)
    at(12.0).end(first)
    at(12.0).rest()
    second = at(100.0).start(is_free=True)
    at(101.0).end(second)
    assert (at(101.0).work_seconds, at(101.0).idle_seconds) == (3.0, 0.0)


def test_time_in_which_a_program_is_compiled_is_left_out(at):
    first = at(10.0).start(is_free=True)
    at(10.1).start(is_free=False)
    at(40.0).skip()
    assert at(40.2).end(first) == (40.0, pytest.approx(0.2))
    assert at(40.2).work_seconds == pytest.approx(0.2)
