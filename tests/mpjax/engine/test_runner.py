from __future__ import annotations

import pytest

from mpjax.finite import NotFiniteError
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


def test_an_end_is_reported_although_the_cache_can_not_be_cleared(tiny, monkeypatch):
    with make_engine(tiny) as engine:
        handle = engine.submit([1, 2, 3])
        engine.step()

        def fail(*_):
            raise RuntimeError("the device is lost")

        monkeypatch.setattr(engine._runner, "_clear", fail)
        [request] = engine._runner.requests.values()
        with pytest.raises(RuntimeError, match="the device is lost"):
            engine._runner.end(request, "error", NotFiniteError("request", 0, "float32"))
        assert handle.finish_reason == "error"


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
