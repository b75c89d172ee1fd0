from __future__ import annotations

import numpy as np
import pytest

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


@pytest.mark.parametrize("tokens", [20, 150])
def test_what_a_row_left_is_cleared_before_the_next_program(tokens, tiny):
    """It is cancelled while its prompt is read, or while it decodes: it may be NaN by then."""
    with make_engine(tiny) as engine:
        runner = engine._runner
        handle = engine.submit([5] * tokens, max_new_tokens=20)
        for _ in range(2):
            engine.step()
        [request] = runner.requests.values()
        pages, slot = list(request.row.pages), request.row.slot
        handle.cancel()
        assert engine.step()[-1].finish_reason == "cancelled"
        assert runner.planner._left == [(slot, [page for page in pages if page])]
        engine.submit([7], max_new_tokens=1).result()
        assert runner.planner._left == []
        own = np.array([page for page in pages if page != 0 and runner.planner.pool.is_free(page)])
        layers = runner._state.layers
        written = [np.asarray(layer.keys)[own].any() for layer in layers]
        assert not any(written)


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
