from __future__ import annotations

import threading
import types

import jax
import pytest

from mpjax.engine.handle import CancelledError
from tests.mpjax.engine.conftest import make_engine

pytestmark = pytest.mark.usefixtures("exact_products")

PROMPTS = ["def f(x):\n    return", "import"]


def test_a_closed_engine_says_so(tiny):
    with make_engine(tiny) as engine:
        handle = engine.submit("import")
    assert handle.finish_reason == "cancelled"
    with pytest.raises(CancelledError, match="the engine was closed"):
        handle.result()
    with pytest.raises(ValueError, match="the engine is closed"):
        engine.submit("import")
    for use in (engine.step, lambda: list(engine), engine.__enter__, lambda: engine.submit(5)):
        with pytest.raises(ValueError, match="the engine is closed"):
            use()
    engine.close()


def test_steps_are_of_one_thread(tiny, monkeypatch):
    with make_engine(tiny) as engine:
        monkeypatch.setattr(engine._runner, "step", list)
        engine.submit("import")
        events = iter(engine)
        with engine._turn:  # so that the thread takes no step
            engine.start()
            for use in (engine.step, lambda: iter(engine), lambda: next(events)):
                with pytest.raises(ValueError, match="a thread runs the engine"):
                    use()
        engine.stop()
        assert engine.step() == []


def test_processes_take_their_steps_together(tiny):
    with make_engine(tiny) as engine:
        engine.start()  # each process has the whole model
        engine.stop()
        engine.lm = types.SimpleNamespace(processes=2)
        with pytest.raises(ValueError, match="devices of 2 processes, whose threads would take"):
            engine.start()


def test_no_request_comes_in_while_an_engine_closes(tiny, monkeypatch):
    engine = make_engine(tiny)
    monkeypatch.setattr("mpjax.engine.request.row_text", lambda *_: engine.close())
    with pytest.raises(ValueError, match="the engine is closed"):
        engine.submit("import")
    assert not engine.has_work


def test_closing_waits_for_a_step_of_another_thread(tiny, monkeypatch):
    engine = make_engine(tiny)
    handle = engine.submit("import")
    began, may_end = threading.Event(), threading.Event()

    def step():
        began.set()
        assert may_end.wait(10)
        assert not handle.is_finished
        return []

    monkeypatch.setattr(engine._runner, "step", step)
    found = []

    def read():
        with pytest.raises(CancelledError, match="the engine was closed"):
            handle.result()
        found.append(handle.finish_reason)

    threads = [threading.Thread(target=read, daemon=True), threading.Thread(target=engine.close)]
    threads[0].start()
    assert began.wait(10)
    threads[1].start()
    threads[1].join(0.1)
    may_end.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert found == ["cancelled"]


@pytest.mark.parametrize("has_thread", [False, True])
@pytest.mark.parametrize("use", ["close", "stop", "step", "compile"])
def test_an_observer_leaves_the_engine_alone(tiny, use, has_thread):
    """Its step would wait for itself. The observer may cancel requests."""
    with make_engine(tiny) as engine:
        handle = engine.submit("import", max_new_tokens=99, sampling={"stop_ids": ()})
        engine.observe(lambda _: handle.cancel())
        with pytest.raises(CancelledError, match="request 0 was cancelled"):
            handle.result()
        engine.observe(lambda _: getattr(engine, use)())
        other = engine.submit("import")
        if has_thread:
            engine.start()
        message = "a thread runs" if use == "step" and has_thread else "an observer may submit and"
        with pytest.raises(ValueError, match=message):
            other.result()
        assert engine.is_closed


@pytest.mark.parametrize(
    ("fault", "reason", "told"),
    [
        (RuntimeError("RESOURCE_EXHAUSTED"), "error", (RuntimeError, "RESOURCE_EXHAUSTED")),
        (KeyboardInterrupt(), "cancelled", (CancelledError, "a step .* was interrupted")),
    ],
)
def test_a_step_that_fails_closes_the_engine(tiny, monkeypatch, fault, reason, told):
    """Its program has taken the state over, and has returned none."""
    with make_engine(tiny) as engine:
        handles = [engine.submit(prompt) for prompt in PROMPTS[:2]]
        engine.step()
        runner = engine._runner

        def fail(*_, **__):
            jax.tree.map(lambda array: array.delete(), runner._state)
            raise fault

        monkeypatch.setattr(runner.programs, "decode", fail)
        with pytest.raises(type(fault)):
            handles[0].result()
        for handle in handles:
            assert handle.finish_reason == reason
            with pytest.raises(told[0], match=told[1]):
                handle.result()
        assert engine.is_closed
        assert not engine.has_work
        with pytest.raises(ValueError, match="the engine is closed"):
            engine.step()


def test_a_thread_that_fails_ends_all_requests(tiny, monkeypatch):
    with make_engine(tiny) as engine:
        handles = [engine.submit(prompt) for prompt in PROMPTS]
        engine.step()

        def fail():
            raise RuntimeError("the device is lost")

        monkeypatch.setattr(engine._runner, "step", fail)
        engine.start()
        for handle in handles:
            with pytest.raises(RuntimeError, match="the device is lost"):
                handle.result()
        assert engine.is_closed
        with pytest.raises(ValueError, match="the engine is closed"):
            list(engine)
        with pytest.raises(ValueError, match="the engine is closed"):
            engine.submit("import")
