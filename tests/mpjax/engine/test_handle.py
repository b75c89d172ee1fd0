from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

from mpjax.engine.handle import CancelledError, Handle, New, PromptLogprobs, Scores
from mpjax.text.row_text import RowText

pytestmark = pytest.mark.any_version


class Engine:
    """Reports what is next whenever somebody waits."""

    def __init__(self):
        self.next = []

    def wait(self, handle, version):
        self.next.pop(0)()


@pytest.fixture
def handle(tiny):
    return Handle(Engine(), 4, [1, 2], RowText(tiny.tokenizer, [1, 2], ["stop"]))


def test_text_comes_in_pieces_and_nothing_is_lost(handle, tiny):
    ids = tiny.tokenizer.encode("x = 12 + y")

    def push(tokens, is_last):
        assert handle.push(New(tokens, [-1.0] * len(tokens))) == len(tokens)
        if is_last:
            handle.finish("length")
        assert handle.report(tokens).finish_reason == ("length" if is_last else None)

    handle._engine.next = [lambda i=i: push([i], i == ids[-1]) for i in ids]
    assert "".join(handle) == handle.text == "x = 12 + y"
    assert (handle.tokens, handle.logprobs) == (ids, [-1.0] * len(ids))
    assert handle.result() is handle


def test_a_stop_string_ends_the_tokens(handle, tiny):
    ids = tiny.tokenizer.encode("a stop here")
    taken = handle.push(New(ids, [0.0] * len(ids), [[(i, 0.0)] for i in ids]))
    assert taken == len(handle.tokens) == len(handle.logprobs) < len(ids)
    assert handle.has_stopped
    assert handle.text == "a "


def test_an_end_is_known_when_it_is_reported(handle):
    handle.finish("cancelled", CancelledError("request 4 was cancelled"))
    assert not handle.is_finished
    event = handle.report([])
    assert handle.is_finished
    assert event.finish_reason == "cancelled"
    with pytest.raises(CancelledError, match="request 4"):
        list(handle)


def test_the_time_of_the_first_token_is_kept(handle):
    handle.report([])
    assert handle.first_token_time is None
    before = time.perf_counter()
    handle.report([1])
    first = handle.first_token_time
    assert before <= first <= time.perf_counter()
    handle.report([2])
    assert handle.first_token_time == first


def test_a_thread_waits_for_the_next_report(handle):
    waiter = threading.Thread(target=handle.wait, args=(0,))
    waiter.start()
    handle.report([])
    waiter.join(10)
    assert not waiter.is_alive()
    handle.wait(0)  # it has been reported


def test_a_loop_that_was_closed_hinders_no_report(handle):
    loops = [asyncio.new_event_loop() for _ in range(2)]
    handle._watchers |= {(loop, asyncio.Event()) for loop in loops}
    loops[0].close()
    handle.finish("length")
    assert handle.report([]).finish_reason == "length"
    assert [loop for loop, _ in handle._watchers] == loops[1:]
    loops[1].close()


def test_scores_of_pieces_are_joined():
    def piece(at):
        number = np.arange(at, at + 3.0)
        pairs = np.stack([number, -number, 7 * number], 1)
        return Scores(at, number, pairs + 1, pairs + 2)

    found = PromptLogprobs.join([piece(0), piece(3)], 6, 2)
    assert found.logprobs.tolist() == [0, 1, 2, 3, 4]
    assert found.best.tolist() == [1, 2, 3, 4, 5]
    assert found.best_logprobs.tolist() == [2, 3, 4, 5, 6]
    assert found.top[:, 1].tolist() == [1, 0, -1, -2, -3]
    assert found.top_logprobs.shape == (5, 2)
    assert PromptLogprobs.join([piece(0)], 3, 0).top.shape == (2, 1)
