from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import pytest

from mpjax import Ngram
from mpjax.engine import compiled
from mpjax.engine.calls import count_programs
from mpjax.engine.compiled import MOST_CONTROLLED, MOST_PROGRAMS, Programs
from mpjax.engine.controlled import constraint_places, create_control
from mpjax.engine.programs import extend
from mpjax.engine.sizes import Sizes, middle_chunk, small_chunk
from mpjax.engine.state import create_state
from tests.mpjax.engine.conftest import make_engine

pytestmark = pytest.mark.any_version


@pytest.mark.parametrize("proposed", [0, 4])
@pytest.mark.parametrize("slots", [1, 4, 5, 48, 64, 256, 1024])
@pytest.mark.parametrize("chunk", [8, 100, 1024, 8192])
def test_there_are_few_sizes_and_each_number_has_one(slots, chunk, proposed, tiny):
    found = Programs(tiny.model, Sizes(slots, (9,), 32, chunk=chunk, proposed=proposed))
    decoding = sum(map(len, found.decoding_sizes.values()))
    reading = sum(map(len, found.reading_sizes.values()))
    # Scores, clearing, copies of recurrent states and what proposers read have one program each.
    most = decoding + reading + 3 + bool(proposed)
    assert most <= MOST_PROGRAMS
    if (slots, chunk) == (64, 1024):
        assert most == MOST_PROGRAMS
    assert found.reading_sizes[True][0] == small_chunk(chunk)
    for greedy in (True, False):
        for size in (chunk, middle_chunk(chunk)):
            assert found.reading_size(size, greedy=greedy, scored=False) == size
    assert found.reading_size(1, greedy=True, scored=False) <= max(chunk // 16, 16)
    assert found.reading_size(1, greedy=False, scored=True) == found.scored_size <= chunk
    for rows in {1, 2, slots // 2 + 1, slots}:
        if rows <= slots:
            size = found.decoding_size(rows, steps=8, greedy=True)
            assert rows <= size <= min(slots, max(4, 64 * rows))
            for greedy in (True, False):
                assert rows <= found.decoding_size(rows, steps=1, greedy=greedy) <= slots


def test_single_steps_have_all_sizes_where_there_are_no_others(tiny):
    found = Programs(tiny.model, Sizes(64, (9,), 32, steps=1))
    assert found.decoding_sizes[True, 1] == [1, 4, 8, 32, 64]


def test_calls_without_rows_are_all_that_there_can_be(tiny):
    """By the names that calls with rows have."""
    found = Programs(tiny.model, Sizes(64, (9,), 32, chunk=1024))
    state = jax.eval_shape(lambda: create_state(tiny, 64, (9,), 2 * tiny.page_size))
    every, few = (
        {call.name for call in found._calls(state, greedy_only=only)} for only in (False, True)
    )
    assert few < every
    assert len(every) == MOST_PROGRAMS - 2  # and one clears pages, and one copies states
    assert few == {name for name in every if name[2 if name[0] is extend else 3]}  # greedy rows


def test_controlled_rows_have_few_programs(tiny):
    """Those for sampled rows, and three that begin a row: it, an empty slot, or forced tokens."""
    found = Programs(tiny.model, Sizes(64, (9,), 32, chunk=1024))

    def create():
        state = create_state(tiny, 64, (9,), 2 * tiny.page_size)
        masked = constraint_places(tiny, Sizes(64, (9,), 32, table_states=0))
        return dataclasses.replace(state, processors=create_control(tiny, 64, masked))

    calls = found._calls(jax.eval_shape(create), greedy_only=False)
    assert len({call.name for call in calls if not call.how.get("greedy")}) + 3 == MOST_CONTROLLED


def test_the_docs_tell_how_many_programs_there_are():
    text = (Path(__file__).parents[3] / "docs/serving.md").read_text(encoding="utf-8")
    said = f"at most {MOST_PROGRAMS} programs are compiled, and at most {MOST_CONTROLLED} more for"
    assert said in text


def test_beginning_with_a_proposer_and_cancelling_are_compiled_ahead(tiny):
    few = {"slots": 1, "steps": 1, "chunk_tokens": 16}
    with make_engine(tiny, speculate=Ngram(k=3, n=2), **few) as engine:
        engine.compile(greedy_only=True)
        before, programs = count_programs(), engine.statistics()["programs"]
        handle = engine.submit([1, 2, 3], max_new_tokens=20)
        for _ in range(2):
            engine.step()
        handle.cancel()
        engine.submit([4, 5], max_new_tokens=2).result()
        assert handle.finish_reason == "cancelled"
        assert (count_programs(), engine.statistics()["programs"]) == (before, programs)


@pytest.mark.parametrize(("weights", "programs"), [(0.5, 1), (3.2, 2), (16, 10), (None, None)])
def test_compiling_leaves_memory_for_what_is_timed_meanwhile(weights, programs, tiny, monkeypatch):
    """For each program a largest weight and half of one; where memory is unknown, no limit."""
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(tiny.model))
    free = None if weights is None else int(weights * largest)
    found = Programs(tiny.model, Sizes(4, (9,), 32))
    assert found._compilers() is None  # on a CPU nothing is timed
    monkeypatch.setattr(compiled.device, "on_gpu", lambda: True)
    monkeypatch.setattr(compiled, "free_bytes_on", lambda mesh: free)
    assert found._compilers() == programs
