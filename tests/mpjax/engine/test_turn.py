from __future__ import annotations

import threading

import pytest

from mpjax.engine.turn import Turn

pytestmark = pytest.mark.any_version


def test_threads_have_it_one_after_another():
    turn, order = Turn(), []

    def take():
        turn.require_other()
        with turn:
            order.append("other")

    with turn:
        thread = threading.Thread(target=take)
        thread.start()
        thread.join(0.05)
        order.append("first")
    thread.join(10)
    assert order == ["first", "other"]


def test_a_thread_that_has_it_does_not_wait_for_itself():
    turn = Turn()
    with turn:
        with pytest.raises(ValueError, match="an observer may submit and cancel requests"):
            turn.require_other()
        with pytest.raises(ValueError, match="a step of the engine runs"), turn:
            pytest.fail("taken twice")
    with turn:  # also after an error
        pass
    turn.require_other()
