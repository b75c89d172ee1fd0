"""The planner beside a device that is a few lines of Python."""

from __future__ import annotations

import dataclasses
import math
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpjax.engine import pages
from mpjax.engine.pages import NOWHERE
from mpjax.engine.planner import Decode, Extend, Planner
from mpjax.engine.row import Row
from mpjax.engine.sizes import Sizes
from tests.mpjax.engine.planned_device import Device

pytestmark = pytest.mark.any_version

SMALL = Sizes(slots=3, pages=(9,), page_size=4, chunk=16, max_gap=0.1, sequences=2, steps=4)


def row(number=0, prompt=10, most=5, *, text=0, **how):
    return Row(number, [text + i for i in range(prompt)], prompt, most, **how)


def test_a_prompt_is_read_in_chunks_between_steps_of_others():
    device = Device(dataclasses.replace(SMALL, pages=(40,)))
    device.planner.submit(row(0, prompt=4, most=40))
    plans = [device.step()]
    device.planner.submit(row(1, prompt=40, most=4, text=100))
    plans += [device.step() for _ in range(8)]
    kinds = [
        [(piece.row.number, piece.start, piece.end) for piece in plan.pieces]
        if isinstance(plan, Extend)
        else (plan.steps, len(plan.rows))
        for plan in plans
    ]
    assert kinds[:7] == [
        [(0, 0, 4)],
        (4, 1),
        [(1, 0, 16)],
        (1, 1),
        [(1, 16, 32)],
        (1, 1),
        [(1, 32, 40)],
    ]
    assert kinds[7] == (4, 2)


def test_prompts_go_first_where_rows_may_wait_for_ever():
    device = Device(dataclasses.replace(SMALL, pages=(40,), max_gap=math.inf))
    for number, prompt in enumerate((4, 40, 20, 7)):
        device.planner.submit(row(number, prompt=prompt, most=6, text=100 * number))
    plans = [plan for plan in [device.step() for _ in range(8)] if plan]
    kinds = [
        plan.tokens if isinstance(plan, Extend) else (plan.steps, len(plan.rows)) for plan in plans
    ]
    # Three slots are filled; the fourth prompt is read when a row has ended.
    assert kinds[:7] == [16, 16, 16, 16, (4, 3), (4, 3), 7]
    device.finish()
    assert len(device.finished) == 4


def test_several_prompts_share_a_program():
    device = Device(dataclasses.replace(SMALL, pages=(40,)))
    for number, prompt in enumerate((5, 30, 2)):
        device.planner.submit(row(number, prompt=prompt, text=100 * number))
    first = device.step()
    assert [(p.row.number, p.start, p.end, p.is_first, p.is_last) for p in first.pieces] == [
        (0, 0, 5, True, True),
        (1, 0, 11, True, False),
    ]


def test_pages_of_the_youngest_go_to_the_oldest_and_nothing_is_lost():
    device = Device(SMALL)
    rows = [row(number, prompt=8, most=16, text=100 * number) for number in range(3)]
    for one in rows:
        device.planner.submit(one)
    device.finish()
    assert device.planner.preemptions > 0
    assert sorted(one.number for one in device.finished) == [0, 1, 2]
    assert device.finished[0] is rows[0]
    assert all(one.tokens == device.text(one) for one in rows)


def test_a_higher_priority_goes_first():
    device = Device(dataclasses.replace(SMALL, slots=1))
    for number, priority in enumerate((0, 0, 1)):
        device.planner.submit(row(number, priority=priority))
    device.finish()
    assert [one.number for one in device.order] == [2, 0, 1]


def test_a_large_request_is_waited_for():
    """Small ones behind it don't overtake it for ever; one of a higher priority does."""
    device = Device(SMALL)
    device.planner.submit(row(0, prompt=8, most=8))
    device.step()
    for number, (prompt, priority) in enumerate([(28, 0), (2, 0), (2, 0), (2, 1)], 1):
        device.planner.submit(row(number, prompt, 2, text=100 * number, priority=priority))
    device.finish()
    assert [one.number for one in device.order] == [0, 4, 1, 2, 3]


def test_a_request_that_never_fits_is_refused():
    planner = Planner(SMALL)
    assert planner.why_never(28, 5) is None
    message = planner.why_never(28, 6)
    assert message is not None
    assert message.startswith("28 tokens and 6 new ones are too many, since the cache holds 32")


@pytest.mark.parametrize(("block", "shared"), [(None, 20), (8, 16)])
def test_equal_beginnings_are_read_once(block, shared):
    """Of whole pages, and of whole blocks; the last token is read anyway."""
    device = Device(dataclasses.replace(SMALL, pages=(40,), chunk=32, block=block))
    first, second = row(0, prompt=21, most=1), row(1, prompt=21, most=1)
    device.planner.submit(first)
    device.finish()
    device.planner.submit(second)
    device.finish()
    assert device.planner.shared_tokens == second.shared == shared
    other = row(2, prompt=21, most=1, shares=False)
    device.planner.submit(other)
    device.finish()
    assert other.shared == 0


def test_what_a_preempted_row_has_read_is_found_again():
    device = Device(dataclasses.replace(SMALL, slots=2, pages=(10,)))
    for number in range(2):
        device.planner.submit(row(number, prompt=12, most=9, text=50 * number))
    device.finish()
    assert device.planner.preemptions == 1
    assert device.planner.shared_tokens >= 8


@pytest.mark.parametrize("proposed", [0, 3])
def test_windows_leave_pages_behind(proposed):
    """Also where fewer tokens are accepted than were planned."""
    sizes = Sizes(slots=1, pages=(48,), page_size=16, chunk=64, windows=(64,), proposed=proposed)
    device = Device(sizes)
    one = row(0, prompt=400, most=200)
    device.planner.submit(one)
    for _ in range(12):
        device.step()
    [pages] = device.planner.running[0].pages
    owned = [page for page in pages if page != NOWHERE]
    assert len(owned) < 400 // 16
    device.finish()


def test_a_piece_longer_than_the_window_keeps_what_its_first_token_sees():
    sizes = Sizes(slots=2, pages=(400,), page_size=16, chunk=1024, windows=(64,))
    device = Device(sizes)
    for number in range(2):
        device.planner.submit(row(number, prompt=3000, most=40, text=10_000 * number))
    device.finish()
    assert len(device.finished) == 2
    assert device.planner.groups.available == 399


def test_prompts_that_are_scored_are_read_apart_in_smaller_pieces():
    device = Device(dataclasses.replace(SMALL, pages=(40,)))
    for number, scored in enumerate((True, False, True)):
        device.planner.submit(row(number, prompt=6, most=1, scored=scored))
    plans = []
    while device.planner.waiting or device.planner.running:
        plan = device.step()
        if isinstance(plan, Extend):
            assert {piece.row.scored for piece in plan.pieces} == {plan.scored}
            if plan.scored:
                assert sum(p.end - p.start for p in plan.pieces) <= device.planner.sizes.scored
            plans.append(plan.scored)
    assert set(plans) == {True, False}


def test_a_row_that_waits_or_runs_can_be_removed():
    planner = Planner(SMALL)
    first, second = row(0), row(1)
    planner.submit(first)
    planner.submit(second)
    planner.remove(second, is_finite=False)
    assert planner.take_left() == []
    planner.plan()
    slot, pages = first.slot, [list(own) for own in first.pages]
    assert len(pages[0]) == 3
    planner.remove(first, is_finite=False)
    assert planner.take_left() == [(slot, pages)]
    assert planner.take_left() == []
    assert planner.plan() is None
    assert planner.groups.available == 8


def test_programs_with_a_sampled_row_have_several_steps():
    device = Device(dataclasses.replace(SMALL, pages=(40,)))
    device.planner.submit(row(0, prompt=3, most=20))
    device.planner.submit(row(1, prompt=3, most=3, text=9, greedy_from=None))
    device.planner.submit(row(2, prompt=3, most=20, text=20, greedy_from=4))
    plans = []
    while device.planner.waiting or device.planner.running:
        plan = device.step()
        if isinstance(plan, Decode):
            plans.append((plan.greedy, plan.steps))
    assert plans[0] == (False, 4)
    assert plans[-1] == (True, 4)
    assert set(plans) == {(False, 4), (True, 4)}


def test_pages_are_there_for_all_that_is_proposed():
    """Lengths are the most that they can be, until results are known."""
    device = Device(dataclasses.replace(SMALL, pages=(40,), page_size=8, proposed=3, steps=2))
    one = row(0, prompt=6, most=40)
    device.planner.submit(one)
    device.step()
    assert (one.length, one.drawn) == (6, 1)
    plan = device.step()
    assert (plan.steps, plan.most, len(one.pages[0])) == (2, 8, 2)
    assert (one.length, one.drawn) == (6 + 8, 1 + 1)
    while one.slot is not None:
        device.step()
        if one.slot is not None:
            known = len(one.tokens)
            assert len(one.flights) == 1
            assert (one.length, one.drawn) == (min(known - 1 + 8, 45), min(known - 6 + 1, 40))
    assert one.tokens == device.text(one)
    assert device.planner.groups.available == 39


def test_ten_thousand_may_wait():
    planner = Planner(SMALL)
    rows = [row(number, prompt=2) for number in range(10_000)]
    for one in rows:
        planner.submit(one)
    for _ in range(100):
        planner.plan()
    for one in rows[::-1]:
        planner.remove(one)
    assert planner.groups.available == 8
    assert not planner.waiting


@st.composite
def traces(draw):
    page_size = draw(st.sampled_from([4, 8]))
    counts = draw(st.sampled_from([(9,), (13,), (16,), (11, 11), (16, 9), (9, 16)]))
    sizes = Sizes(
        slots=draw(st.integers(1, 4)),
        pages=counts,
        page_size=page_size,
        block=draw(st.sampled_from([None, None, 8])),
        chunk=draw(st.sampled_from([8, 16, 64])),
        max_gap=draw(st.sampled_from([None, math.inf, 0.01])),
        sequences=draw(st.integers(1, 3)),
        steps=draw(st.integers(1, 4)),
        windows=(draw(st.sampled_from([None, None, 8])), 4)[: len(counts)],
        proposed=draw(st.sampled_from([0, 0, 2, 3])),
    )
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(1, 20),  # tokens of the prompt
                st.integers(1, 12),  # the most new ones
                st.integers(1, 12),  # after which it ends
                st.integers(0, 2),  # the text that it begins
                st.integers(0, 1),  # its priority
                st.integers(0, 6),  # steps until the next comes
                st.sampled_from([None, None, None, 0, 3, 9]),  # steps after which it is cancelled
            ),
            min_size=1,
            max_size=8,
        )
    )
    return draw(st.sampled_from([4, 256])), sizes, rows


@settings(max_examples=300)
@given(traces())
def test_any_trace(trace):
    slack, *_ = trace
    with mock.patch.object(pages, "WINDOW_SLACK", slack):
        run_trace(*trace[1:])


def run_trace(sizes, requests):
    device = Device(sizes, enumerate(ends for _, _, ends, *_ in requests))
    rows, cancelled, clock = [], {}, 0

    def advance(steps):
        nonlocal clock
        for _ in range(steps):
            device.step()
            clock += 1
            for one, when in list(cancelled.items()):
                if when <= clock:
                    del cancelled[one]
                    if one.slot is not None or one in device.planner.waiting:
                        device.leave(one)
                        device.finished.append(one)
                        one.most = -1

    for number, (prompt, most, _, text, priority, pause, cancel) in enumerate(requests):
        one = row(number, prompt, most, text=100 * text, priority=priority)
        rows.append(one)
        device.planner.submit(one)
        if cancel is not None:
            cancelled[one] = clock + cancel
        advance(pause)
    advance(10 if cancelled else 0)
    device.finish()
    assert sorted(one.number for one in device.finished) == list(range(len(requests)))
    for one in rows:
        if one.most > 0:
            assert one.tokens == device.text(one)[: one.prompt + device.most(one)]
    assert device.planner.groups.available == device.planner.groups.pages


def test_rows_whose_pages_suffice_need_no_headroom():
    sizes = {"slots": 32, "pages": (33,), "page_size": 8, "sequences": 32, "chunk": 128}
    device = Device(dataclasses.replace(SMALL, **sizes))
    for number in range(32):
        device.planner.submit(row(number, prompt=3, most=5, text=number))
    device.step()
    assert len(device.planner.running) == 32
