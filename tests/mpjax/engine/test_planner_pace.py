"""Plans of a planner that is told how long programs take."""

from __future__ import annotations

import dataclasses
import math

import pytest

from mpjax.engine.planner import Decode, Extend, Planner
from mpjax.engine.sizes import Sizes
from tests.mpjax.engine.test_planner import row

pytestmark = pytest.mark.any_version

TIMED = Sizes(slots=300, pages=(50_000,), page_size=16, chunk=4096, steps=1)


def padded(plan):
    """The size of a program that reads."""
    return next(size for size in (256, 1024, 4096) if size >= plan.tokens)


def run_timed(sizes, rows, seconds=lambda plan: 0.0):
    """Plans of rows that come at once, until they end, with the longest wait for a decoding step.

    seconds: of a plan, by the rates that the planner is told.
    """
    planner = Planner(sizes)
    for one in rows:
        planner.submit(one)
    plans, gap, longest = [], 0.0, 0.0
    while planner.running or planner.waiting:
        plan = planner.plan()
        took = seconds(plan)
        gap += took
        if isinstance(plan, Decode):
            planner.pace.learn_step(took / plan.steps)
            longest, gap = max(longest, gap), 0.0
            ended = [row for row in plan.rows if not row.left]
        else:
            size = padded(plan)
            planner.pace.learn_reading(size, plan.work, took)
            ended = [piece.row for piece in plan.pieces if piece.is_last and not piece.row.left]
        plans.append(plan)
        for one in ended:
            planner.remove(one)
    return plans, longest


def as_on_a_gpu(plan):
    """Seconds of a plan, when 32 rows decode or a few thousand tokens are read."""
    if isinstance(plan, Decode):
        return 0.007 + 0.00003 * len(plan.rows)
    return 0.003 + 0.000023 * padded(plan) + 0.00002 * plan.work


@pytest.mark.parametrize("gap", [None, 0.03])
def test_a_long_prompt_leaves_rows_that_decode_short_gaps(gap):
    rows = [row(number, prompt=900, most=400, text=10_000 * number) for number in range(32)]
    rows.append(row(32, prompt=32_000, most=2, text=10**6))
    sizes = dataclasses.replace(TIMED, max_gap=gap)
    plans, _ = run_timed(sizes, rows, as_on_a_gpu)
    gaps, since = [], 0.0
    for plan in plans:
        since += as_on_a_gpu(plan)
        if isinstance(plan, Decode):
            gaps.append((len(plan.rows), since))
            since = 0.0
    # Once all others decode.
    longest = max(since for rows, since in gaps if rows >= 32)
    assert longest <= (gap or 0.05) * 1.05
    longs = [plan for plan in plans if isinstance(plan, Extend) and plan.pieces[0].start > 16_000]
    assert {plan.tokens <= 1024 for plan in longs} == {True}
    assert len(longs) < (120 if gap else 80)


def test_many_prompts_at_once_are_read_in_whole_chunks_first():
    rows = [row(number, prompt=1024, most=5, text=10_000 * number) for number in range(256)]
    plans, longest = run_timed(TIMED, rows_again(rows), as_on_a_gpu)
    sizes = [plan.tokens for plan in plans if isinstance(plan, Extend)]
    assert sizes[:2] == [4096] * 2
    assert sizes.count(4096) > 8
    assert longest <= 0.2
    fixed = dataclasses.replace(TIMED, max_gap=math.inf)
    assert {
        plan.tokens for plan in run_timed(fixed, rows_again(rows))[0] if isinstance(plan, Extend)
    } == {4096}


def test_several_programs_read_in_a_gap_that_is_long_enough():
    rows = [row(number, prompt=1024, most=5, text=10_000 * number) for number in range(64)]
    sizes = dataclasses.replace(TIMED, max_gap=0.1)
    plans, _ = run_timed(sizes, rows, as_on_a_gpu)
    kinds = "".join("D" if isinstance(plan, Decode) else "E" for plan in plans)
    assert "DEEED" in kinds
    assert "EEEEE" not in kinds
    gaps = [sum(map(as_on_a_gpu, plans[at : at + 4])) for at in range(4, len(plans) - 4)]
    runs = [gap for at, gap in enumerate(gaps, 4) if kinds[at : at + 4] == "EEED"]
    assert runs
    assert max(runs) <= 0.1


def rows_again(rows):
    """The same requests, anew."""
    return [row(one.number, one.prompt, one.most, text=one.tokens[0]) for one in rows]


def test_random_rows_have_no_small_program():
    sizes = dataclasses.replace(TIMED, max_gap=0.001, sequences=1)
    rows = [row(0, prompt=8, most=300, greedy_from=None), row(1, prompt=3000, most=1, text=99)]
    plans, _ = run_timed(sizes, rows, as_on_a_gpu)
    assert max(plan.tokens for plan in plans[1:] if isinstance(plan, Extend)) > 256


def test_short_prompts_of_random_rows_count_as_the_programs_that_read_them():
    """Each takes a middle program, of which two fit in the gap."""
    sizes = dataclasses.replace(TIMED, max_gap=0.05, sequences=1)
    planner = Planner(sizes)
    for size, seconds in ((256, 0.0083), (1024, 0.0203), (4096, 0.09)):
        planner.pace.learn_reading(size, 0, seconds)
    planner.pace.learn_step(0.008)
    for number in range(9):
        how = {"text": 1000 * number, "greedy_from": None}
        planner.submit(row(number, prompt=100, most=300, **how))
    plans = [planner.plan() for _ in range(12)]
    kinds = "".join("D" if isinstance(plan, Decode) else "E" for plan in plans)
    assert kinds == "EED" * 4


def test_rows_that_may_wait_for_ever_wait_for_all_prompts():
    sizes = dataclasses.replace(TIMED, max_gap=math.inf, sequences=1)
    rows = [row(number, prompt=100, most=3, text=1000 * number) for number in range(5)]
    plans, _ = run_timed(sizes, rows)
    assert "".join("D" if isinstance(plan, Decode) else "E" for plan in plans) == "EEEEEDD"


def test_a_prompt_is_read_by_programs_that_it_fills():
    """Padding takes as long as tokens."""
    planner = Planner(Sizes(slots=3, pages=(999,), page_size=4, chunk=256))
    planner.submit(row(prompt=150, most=1))
    assert planner.plan().tokens == 150  # as long as no seconds are known
    for size in (16, 64, 256):
        planner.pace.learn_reading(size, 0, 0.01 * size)
    planner.submit(row(1, prompt=150, most=1))
    planner.submit(row(2, prompt=300, most=1))
    assert [planner.plan().tokens for _ in range(4)] == [256, 64, 64, 64]
    assert planner.plan().tokens == 2
