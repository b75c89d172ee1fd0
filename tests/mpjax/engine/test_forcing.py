"""Forced tokens are prefilled: the results are those of steps."""

from __future__ import annotations

import collections

import numpy as np
import pytest

import mpjax
from mpjax.engine import forcing
from tests.mpjax.engine.conftest import make_engine

pytestmark = pytest.mark.usefixtures("exact_products")

LONG = "Zk7 words Xq9Wv " * 2  # many tokens
BEGIN = mpjax.Regex(f"{LONG}[a-c]{{4}}{LONG}")
MIDDLE = mpjax.Regex(f"[a-c]{{2}}{LONG}[a-c]{{4}}{LONG}x{{2,9}}")
DRAWN = {"temperature": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3}
ASKED = [
    ([3, 5, 3, 9], {"constraint": BEGIN, "sampling": DRAWN, "logprobs": 3}),
    ([11, 2], {"sampling": DRAWN}),
    ([7, 8, 9], {"constraint": MIDDLE, "prompt_logprobs": True}),
    ([4], {"constraint": MIDDLE, "max_new_tokens": 12}),  # which is within a forced run
    ([4, 4], {"constraint": MIDDLE, "stop": "words", "sampling": DRAWN}),
]


def run(lm, table_states, *, preempts=False):
    """The handles of ASKED, and the programs that the engine ran.

    preempts: whether rows with forced tokens are preempted, before and after the piece's launch.
    """
    runs, seen = [], collections.Counter()
    with make_engine(lm, table_states=table_states) as engine:
        engine.observe(runs.append)
        handles = [
            engine.submit(prompt, seed=seed, **{"max_new_tokens": 90} | asked)
            for seed, (prompt, asked) in enumerate(ASKED)
        ]
        planner = engine._runner.planner
        while engine.has_work:
            engine.step()
            for row in [row for row in planner.running if row.forced and preempts]:
                seen[row.number] += 1
                if seen[row.number] in (1, 3):
                    planner._preempt(row)
        assert (max(seen.values(), default=0) >= 3) == preempts
        return handles, runs


def require_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert (one.tokens, one.text) == (other.tokens, other.text)
        assert one.finish_reason == other.finish_reason
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        for tops in zip(one.top_logprobs, other.top_logprobs, strict=True):
            np.testing.assert_allclose(*tops, atol=1e-5)
    for tops in zip(*(each[2].prompt_logprobs.logprobs for each in (found, expected)), strict=True):
        np.testing.assert_allclose(*tops, atol=1e-5)


@pytest.mark.parametrize("table_states", [0, 512])
def test_results_are_those_of_steps(tiny, monkeypatch, table_states):
    found, runs = run(tiny, table_states)
    again, _ = run(tiny, table_states, preempts=True)
    monkeypatch.setattr(forcing, "LEAST_FORCED", 1000)
    expected, steps = run(tiny, table_states)
    require_equal(found, expected)
    require_equal(again, expected)
    decoded = [sum(one.rows for one in each if one.kind == "decode") for each in (runs, steps)]
    assert decoded[0] < 0.75 * decoded[1]
