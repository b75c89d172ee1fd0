from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpjax.engine.pace import CONTEXT, SLOWER, Pace, context_work, tokens_within, usual_gap

pytestmark = pytest.mark.any_version

SIZES = [256, 1024, 4096]
LONG = [(0, 100_000)]  # a long prompt that is not begun
# Seconds of programs that read, at positions near 0: those of few tokens take as long as weights.
SECONDS = {256: 0.010, 1024: 0.025, 4096: 0.095}


def measured(step=0.009):
    pace = Pace()
    for size, seconds in SECONDS.items():
        pace.learn_reading(size, 0, seconds)
    pace.learn_step(step)
    return pace


@given(st.integers(0, 100_000), st.floats(0, 1e6))
def test_tokens_are_the_most_within_some_work(start, work):
    tokens = tokens_within(start, work)
    assert context_work(start, tokens) <= work + 1e-3
    assert context_work(start, tokens + 1) >= work - 1e-3
    assert tokens_within(start, math.inf) > 10**9


def test_a_token_at_the_position_of_the_context_costs_twice_as_much():
    assert context_work(CONTEXT, 1) == pytest.approx(1, rel=1e-4)


def test_the_size_is_the_fastest_within_the_gap():
    pace = measured()
    assert [pace.choose(SIZES, LONG, gap)[0] for gap in (0.012, 0.03, 0.05, 0.2, math.inf)] == [
        256,
        256,
        1024,
        4096,
        4096,
    ]
    _, work = pace.choose(SIZES, LONG, 0.05)
    assert SECONDS[1024] * (1 + work / 1024) == pytest.approx(0.05 - 0.009)
    assert pace.choose(SIZES, LONG, math.inf) == (4096, math.inf)


def test_tokens_that_attend_to_much_are_read_in_small_programs():
    """A larger one would read hardly more of them, but take its time for its padding, too."""
    pace = measured()
    for start in (0, 8_000, 32_000, 100_000):
        size, work = pace.choose(SIZES, [(start, 100_000)], 0.05)
        tokens = min(size, tokens_within(start, work))
        seconds = pace.rate(size) * (size + context_work(start, tokens))
        assert seconds + 0.009 <= 0.05 + 1e-9
        assert tokens > 0
    assert pace.choose(SIZES, [(32_000, 100_000)], 0.05)[0] == 256


def test_a_size_is_left_out_where_it_would_be_padding():
    """Of equal speeds it is the larger size, for there are fewer launches."""
    pace = measured()
    for rows, size in (
        ([(0, 4096)], 4096),
        ([(0, 1500)], 1024),
        ([(0, 1000), (0, 500)], 1024),
        ([(0, 476)], 256),
        ([(0, 700)], 1024),
        ([(0, 3900)], 4096),
        ([(0, 1024)] * 4, 4096),
    ):
        assert pace.choose(SIZES, rows, math.inf) == (size, math.inf)
        assert measured(step=0).choose(SIZES, rows, 1.0)[0] == size
    assert Pace().choose(SIZES, [(0, 1500)], math.inf)[0] == 1024
    assert Pace().choose(SIZES, [(0, 5000)], math.inf)[0] == 4096


@pytest.mark.parametrize("gap", [1e-6, 0.009, 0.0095])
def test_a_gap_that_is_too_small_leaves_the_smallest_program(gap):
    size, work = measured().choose(SIZES, LONG, gap)
    assert size == 256
    assert tokens_within(0, work) >= 256
    assert tokens_within(100_000, work) < 16


def test_before_anything_is_measured_it_is_the_second_size():
    assert Pace().choose(SIZES, LONG, 0.05) == (1024, 1024)
    assert Pace().choose([64], LONG, 0.05) == (64, 64)
    assert Pace().step_seconds == 0


def test_one_program_that_was_held_up_changes_nothing():
    pace = measured()
    for seconds in (0.025, 0.9):
        pace.learn_reading(1024, 0, seconds)
        pace.learn_step(seconds)
    assert pace.rate(1024) == 0.025 / 1024
    assert pace.step_seconds == 0.025
    pace.learn_reading(1024, 0, 0.9)
    assert pace.choose(SIZES, LONG, 0.05)[0] == 256


def test_a_size_that_was_held_up_several_times_is_tried_again():
    pace = measured()
    for _ in range(3):
        pace.learn_reading(1024, 0, 0.9)
    assert pace.rate(1024) == SLOWER * pace.rate(256)
    for _ in range(3):
        pace.learn_reading(256, 0, 0.006)
    assert pace.choose(SIZES, LONG, 0.05)[0] == 1024


def test_many_programs_of_one_size_leave_what_others_have_taken():
    pace = measured()
    for _ in range(100):
        pace.learn_reading(256, 0, SECONDS[256])
    assert pace.rate(1024) == SECONDS[1024] / 1024
    assert pace.choose(SIZES, LONG, 0.05)[0] == 1024


def test_sizes_without_programs_are_tried():
    pace = Pace()
    pace.learn_reading(256, 0, 0.01)
    pace.learn_step(0.015)
    assert pace.seconds(1024, 0) == pytest.approx(0.02)
    assert pace.choose(SIZES, LONG, 0.05)[0] == 1024
    pace.learn_reading(1024, 0, 0.025)
    assert pace.seconds(4096, 0) == pytest.approx(0.05)
    assert pace.choose(SIZES, LONG, 0.05)[0] == 1024
    assert pace.seconds(16, 0) == pytest.approx(0.01 / 16)


def test_the_work_of_the_context_is_part_of_the_seconds():
    pace = Pace()
    pace.learn_reading(256, 256, 0.02)
    assert pace.rate(256) == 0.02 / 512


def test_many_that_wait_make_the_usual_gap_longer():
    gaps = [usual_gap(waiting, decoding) for waiting, decoding in ((1, 32), (6, 3), (250, 4))]
    assert gaps == [0.05, 0.1, 0.2]
    assert usual_gap(3, 0) == pytest.approx(0.15)
