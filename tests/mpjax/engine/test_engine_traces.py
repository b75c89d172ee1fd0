"""Random traces of requests, after each step of which the engine's parts agree."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import mpjax
from mpjax.sampling.token_lists import NO_ID
from tests.mpjax.engine.conftest import (
    damage_what_rows_leave,
    is_clean,
    make_engine,
    require_order,
    resize,
)
from tests.sweeps import in_sweep

pytestmark = pytest.mark.usefixtures("exact_products")

NEW = 16


@st.composite
def arrivals(draw):
    """A request of a random trace: its prompt, what is asked, and the steps until others come.

    Prompts begin alike, and have few words, so that tokens can be proposed.
    """
    common, own = draw(st.sampled_from([0, 40, 66, 100])), draw(st.integers(1, 60))
    text = draw(st.integers(0, 2))
    prompt = [1 + i * i % 29 for i in range(common)]
    prompt += [1 + (text + i) * (i + 3) % 31 for i in range(own)]
    options = {
        "max_new_tokens": draw(st.integers(1, NEW)),
        "sampling": draw(st.sampled_from([KEEPS_ON, KEEPS_ON, DRAWN, REPEATS])),
        "seed": text,
        "prompt_logprobs": draw(st.sampled_from([False, False, True])),
        "constraint": draw(st.sampled_from([None, None, WORDS])),
    }
    cancel = draw(st.sampled_from([*[None] * 9, 0, 2, 5]))
    return prompt, options, draw(st.integers(-1, 1)), draw(st.integers(0, 3)), cancel


GAPS = st.sampled_from([math.inf, 1e-9])  # prompts first, or turns
KEEPS_ON, DRAWN = {"stop_ids": ()}, {"temperature": 1.2}
# Tokens that were seen are the likeliest by far, so that a wrong one among them is soon drawn.
REPEATS = {"temperature": 1.2, "repetition_penalty": 0.05, "stop_ids": ()}
WORDS = mpjax.Regex("([a-z]{1,5} ){3,}")
# Rows that need the pages of others: of one whose prompt is read and scored, of one that has drawn.
CROWDED = [
    ([5] * 20, {"max_new_tokens": 70, "sampling": KEEPS_ON}, 1, 2, None),
    ([6] * 20, {"max_new_tokens": 60, "sampling": REPEATS, "seed": 1}, 0, 3, None),
    (list(range(1, 100)), {"prompt_logprobs": True, "max_new_tokens": 2}, -1, 9, None),
    ([7] * 10, {"max_new_tokens": 40, "sampling": REPEATS, "seed": 2}, 0, 4, None),
    ([9] * 10, {"max_new_tokens": 40, "sampling": DRAWN, "constraint": WORDS}, 0, 4, None),
    ([8] * 10, {"max_new_tokens": 40, "sampling": REPEATS, "seed": 3}, 0, 2, 3),
]


def require_agreement(engine, handles):
    """What holds after each step: in the planner, on the device, and of requests."""
    runner = engine._runner
    planner, state = runner.planner, runner._state
    require_order(planner)
    tables, lengths = map(np.asarray, (state.cache.tables[0], state.cache.lengths))
    for row in planner.running:
        assert tables[row.slot, : len(row.pages[0])].tolist() == row.pages[0]
        # The device is as far as the plan, unless the row ends before, or tokens are refused.
        least = row.length if row.is_reading else len(row.tokens) - 1
        if (row.owner.settings.row.stop_ids != NO_ID).any() or planner.sizes.proposed:
            assert least <= lengths[row.slot] <= row.length
        else:
            assert lengths[row.slot] == row.length
        assert row.tokens == row.owner.handle.prompt + row.owner.handle.tokens
    there = [row.owner.handle for row in (*planner.running, *planner.waiting)]
    assert len(there) == len(set(there))
    assert set(there) == {handle for handle in handles if not handle.is_finished}


def run_trace(engine, trace):
    """The handles of a trace's requests, when all have ended."""
    handles, cancelled = [], {}

    def step():
        engine.step()
        require_agreement(engine, handles)
        now = engine.statistics()["steps"]
        for handle in [one for one, when in cancelled.items() if when <= now]:
            cancelled.pop(handle)
            handle.cancel()

    for prompt, options, priority, pause, cancel in trace:
        handles.append(engine.submit(prompt, priority=priority, **options))
        if cancel is not None:
            cancelled[handles[-1]] = engine.statistics()["steps"] + cancel
        for _ in range(pause):
            step()
    while engine.has_work:
        step()
    return handles


def said_by_itself(engine, prompt, options):
    """A request's handle at its end, in an engine without others, and without their pages."""
    resize(engine, pages=25)
    handle = engine.submit(prompt, **options)
    for _ in engine:
        pass
    return handle


@pytest.mark.parametrize(
    ("text", "speculates", "examples"),
    [
        ("KV16", False, 3),
        *(in_sweep(text, speculates, 30) for text in ("KV16", "KV4cg32") for speculates in (0, 1)),
    ],
)
def test_any_trace(text, speculates, examples, tiny):
    """After each step nothing is lost or owned twice; at the end all is said as if alone.

    In one of them a row is preempted while its prompt is scored, and one after it has drawn.
    """
    ngram = mpjax.Ngram(k=3, n=1) if speculates else None
    preempted = []
    with make_engine(tiny, text, speculate=ngram, table_states=0) as engine:

        @settings(max_examples=examples)
        @given(st.lists(arrivals(), min_size=4, max_size=8), st.integers(7, 8), GAPS)
        @example(CROWDED, 7, 1e-9)
        def check(trace, pages, gap):
            resize(engine, pages=pages, max_gap=gap)
            rows = damage_what_rows_leave(engine)
            handles = run_trace(engine, trace)
            preempted.extend(rows)
            assert is_clean(engine)
            for (prompt, options, *_, cancel), handle in zip(trace, handles, strict=True):
                alone = said_by_itself(engine, prompt, options)
                if handle.finish_reason == "cancelled":
                    assert cancel is not None
                    assert handle.tokens == alone.tokens[: len(handle.tokens)]
                    continue
                assert handle.tokens == alone.tokens
                if options.get("constraint") and handle.finish_reason == "stop":
                    assert re.fullmatch(WORDS.pattern, handle.text)
                if options.get("prompt_logprobs"):
                    found, wanted = handle.prompt_logprobs, alone.prompt_logprobs
                    np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=1e-4)

        check()
        assert any(row.scored and row.is_reading and row.length for row in preempted)
        assert any(row.is_controlled and row.drawn > 1 for row in preempted)
        assert any(row.is_constrained and row.drawn > 1 for row in preempted)
