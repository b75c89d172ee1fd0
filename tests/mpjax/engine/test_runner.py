from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

from mpjax import Ngram
from mpjax.engine.clock import Clock
from mpjax.engine.compiled import Programs
from mpjax.engine.planner import Decode
from tests.mpjax.engine.conftest import make_engine


@pytest.fixture(scope="module")
def runner(tiny):
    with make_engine(tiny) as engine:
        yield engine._runner


@pytest.fixture
def submit(runner, tiny):
    """Submits prompts to the runner itself; `requests` are what it knows."""
    with make_engine(tiny) as other:

        def submit(*prompts, **options):
            for prompt in prompts:
                other.submit(prompt, **({"max_new_tokens": 9} | options))
                runner.submit(other._inbox.pop())
            return list(runner.requests.values())

        yield submit


def test_results_are_read_a_step_late(runner, submit):
    [request] = submit([1, 2, 3])
    assert runner.step() == []  # the prompt
    [first] = runner.step()  # four steps of decoding are under way
    assert len(first.tokens) == 1
    assert (request.row.drawn, len(request.handle.tokens)) == (5, 1)
    counts = []
    while runner.has_work:
        counts += [len(event.tokens) for event in runner.step()]
    assert counts == [4, 4]
    assert request.handle.finish_reason == "length"
    assert not runner.requests


def test_the_planner_learns_the_seconds_of_programs(runner, submit):
    """Of those that were not compiled, and that the device did not wait for."""
    pace, clock = runner.planner.pace, runner.clock
    for _ in range(20):  # a program that a busy host starts late is not measured
        submit([3] * 60)
        while runner.has_work:
            runner.step()
        if pace.step_seconds and pace.seconds(64, 0) < math.inf:
            break
    assert 0 < pace.step_seconds < 1
    assert 0 < pace.rate(64) < 1
    assert 0 <= clock.idle_seconds < clock.work_seconds
    before = clock.work_seconds
    assert runner.step() == []
    assert clock.work_seconds == before


@pytest.mark.parametrize("tokens", [20, 150])
def test_what_a_row_left_is_cleared_before_the_next_program(tokens, tiny):
    """It is cancelled while its prompt is read, or while it decodes: it may be NaN by then."""
    with make_engine(tiny) as engine:
        runner = engine._runner
        handle = engine.submit([5] * tokens, max_new_tokens=20)
        for _ in range(2):
            engine.step()
        [request] = runner.requests.values()
        [pages], slot = [list(own) for own in request.row.pages], request.row.slot
        handle.cancel()
        assert engine.step()[-1].finish_reason == "cancelled"
        left = runner.planner.groups.unowned([pages])
        assert runner.planner._left == [(slot, left)]
        assert left[0]  # others are known to be finite, and published
        engine.submit([7], max_new_tokens=1).result()
        assert runner.planner._left == []
        own = np.array(runner.planner.groups.unowned([pages])[0])
        layers = runner._state.cache.layers
        written = [np.asarray(layer.keys)[own].any() for layer in layers]
        assert not any(written)


def test_programs_that_hold_the_host_are_measured_when_they_return(tiny, monkeypatch):
    monkeypatch.setattr(Programs, "holds_host", True)
    with make_engine(tiny) as engine:
        runner = engine._runner
        engine.submit([1, 2, 3], max_new_tokens=20)
        for _ in range(3):
            engine.step()
            pending = runner._pending
        assert isinstance(pending.plan, Decode)
        assert not pending.is_measured
        assert runner.planner.pace.step_seconds > 0


class Device:
    """A device whose programs take given seconds, and a host whose own work takes none."""

    def __init__(self):
        self.now = self.end = 0.0  # when the last program ends

    def slow(self, program, seconds, *, holds_host):
        def run(*arguments, **how):
            state, drawn, *rest = program(*arguments, **how)
            self.end = max(self.end, self.now) + seconds
            if holds_host:
                self.now = self.end
            return state, dataclasses.replace(drawn, packed=Result(self, drawn.packed)), *rest

        return run


class Result:
    """An array that is known when the program has ended which the device was given last."""

    def __init__(self, device, array):
        self.device, self.array, self.end = device, array, device.end

    def is_ready(self):
        return self.device.now >= self.end

    def block_until_ready(self):
        self.device.now = max(self.device.now, self.end)

    def copy_to_host_async(self):
        pass

    def __array__(self, *arguments, **how):
        self.block_until_ready()
        return np.asarray(self.array)


def test_a_program_that_holds_the_host_does_not_hide_the_end_of_the_one_before(tiny, monkeypatch):
    monkeypatch.setattr(Programs, "holds_host", True)
    device, readings, steps = Device(), [], []
    with make_engine(tiny, max_gap=0.001) as engine:
        runner = engine._runner
        programs, pace = runner.programs, runner.planner.pace
        runner.clock = Clock(lambda: device.now)
        extend = device.slow(programs.extend, 0.045, holds_host=False)
        monkeypatch.setattr(programs, "extend", extend)
        monkeypatch.setattr(programs, "decode", device.slow(programs.decode, 0.01, holds_host=True))
        monkeypatch.setattr(pace, "learn_reading", lambda *found: readings.append(found[-1]))
        monkeypatch.setattr(pace, "learn_step", steps.append)
        for token in (1, 2):  # at first, programs are compiled
            readings.clear()
            steps.clear()
            engine.submit([token], max_new_tokens=30)
            engine.step()
            engine.submit([token + 2] * 150, max_new_tokens=2).result()
            for _ in engine:
                pass
    assert len(readings) > 3
    assert readings == pytest.approx([0.045] * len(readings))
    assert {round(seconds, 9) for seconds in steps} <= {0.01, 0.0025}


def test_programs_are_told_in_order(tiny):
    """Until the observer is taken away."""
    with make_engine(tiny) as engine:
        told = []
        engine.observe(told.append)
        engine.submit([1] * 60, max_new_tokens=9).result()
        engine.observe(None)
        engine.submit([2] * 60, max_new_tokens=9).result()
    read, *decoded = told
    assert (read.kind, read.tokens, read.size, read.rows, read.steps) == ("read", 60, 64, 1, 0)
    assert {(run.kind, run.tokens, run.rows) for run in decoded} == {("decode", 0, 1)}
    assert sum(run.steps for run in decoded) >= 8
    assert all(
        before.begin + before.seconds <= after.begin + 1e-9
        for before, after in itertools.pairwise(told)
    )
    assert read.context == 60 < decoded[-1].context <= 69
    assert not read.is_measured  # it was compiled


def test_the_context_of_a_program_is_that_of_its_own_tokens(tiny):
    """Also when the row has ended, or tokens of the next program are planned, as it is read."""
    with make_engine(tiny) as engine:
        told = []
        engine.observe(told.append)
        handle = engine.submit([1] * 60, max_new_tokens=99, sampling={"stop_ids": ()})
        for _ in range(4):
            engine.step()
        handle.cancel()
        for _ in engine:
            pass
    assert [run.context for run in told] == [60, 64, 68, 72]


def test_a_speculating_step_is_measured_by_the_steps_that_ran(tiny, monkeypatch):
    """Proposals that are all accepted end a program of eight steps at a page of tokens."""
    with make_engine(tiny, steps=8, speculate=Ngram(k=31, n=1)) as engine:
        runner, clock, learned, expected = engine._runner, Clock(), [], []
        monkeypatch.setattr(clock, "end", lambda start: (0.0, 0.24))
        runner.clock = clock
        monkeypatch.setattr(runner.planner.pace, "learn_step", learned.append)
        read = runner._receive

        def watch(pending):
            if isinstance(pending.plan, Decode) and pending.is_measured:
                steps = int(np.asarray(pending.drawn.speculated.steps).max())
                expected.extend([0.24 / steps] if steps else [])
            return read(pending)

        monkeypatch.setattr(runner, "_receive", watch)
        monkeypatch.setattr(runner, "_begin", lambda: 0.0)  # no step is late
        engine.submit([5] * 40, max_new_tokens=100).result()
    assert learned == expected
    assert max(learned) > 0.24 / 8


def test_a_stop_string_lets_the_device_go_on_and_so_is_cleared(tiny):
    with make_engine(tiny) as engine:
        text = engine.submit("def f(x):", max_new_tokens=16).result().text
        engine.submit("def f(x):", max_new_tokens=16, stop=[text[2:4]]).result()
        assert len(engine._runner.planner._left) == 1


def test_what_a_row_said_after_its_end_is_left_out(runner, submit):
    """The device goes on for a step when a stop string or a cancellation ends a row."""
    first, second = submit([1, 2, 3], [7, 8], max_new_tokens=30)
    for _ in range(3):
        runner.step()
    event = runner.end(first, "cancelled")
    before = list(first.handle.tokens)
    assert event.finish_reason == first.handle.finish_reason == "cancelled"
    while runner.has_work:
        assert all(event.handle is second.handle for event in runner.step())
    assert first.handle.tokens == before
    assert len(second.handle.tokens) == 30
