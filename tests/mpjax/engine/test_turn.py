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


def test_a_thread_of_many_turns_lets_another_have_its_own():
    turn, taken, turns = Turn(), threading.Event(), 0

    def take():
        with turn:
            taken.set()

    with turn:
        thread = threading.Thread(target=take)
        thread.start()
        thread.join(0.05)
    while not taken.is_set() and turns < 1000:
        with turn:
            turns += 1
    thread.join(10)
    assert turns <= 1
