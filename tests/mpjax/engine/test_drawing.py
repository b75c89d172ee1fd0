from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.engine.drawing import draw, is_end
from mpjax.engine.state import CANDIDATES, RowSettings
from mpjax.random_keys import row_keys, step_keys
from mpjax.sampling import Sampling, logprobs, sample

ROWS = [
    {},
    {"temperature": 1.3},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 0.7, "top_p": 0.6},
    {"temperature": 2.0, "min_p": 0.7},
    {"repetition_penalty": 3.0},
]
FIELDS = {"repetition_penalty": "penalty"}
COUNTS = np.arange(6, dtype=np.int32)


def settings_of(rows: list[dict[str, Any]]) -> RowSettings:
    settings = RowSettings.usual(len(rows))
    for index, fields in enumerate(rows):
        for name, value in fields.items():
            getattr(settings, FIELDS.get(name, name))[index] = value
    settings.key_words[:, 1] = 7 + np.arange(len(rows))
    return settings


@pytest.fixture
def arrays(rng):
    logits = jnp.asarray(rng.normal(size=(6, 40)).astype(np.float32) * 2)
    return logits, jnp.asarray(rng.random((6, 40)) < 0.3)


compiled = jax.jit(draw)


@pytest.mark.parametrize("rows", [ROWS, *([ROWS[0], one] * 3 for one in ROWS[1:])])
def test_each_row_is_drawn_as_it_would_be_alone(rows, arrays):
    """All filters together, and each as the only one of a batch."""
    logits, seen = arrays
    drawn, chances, _ = compiled(logits, settings_of(rows), COUNTS, seen)
    keys = step_keys(row_keys(7 + np.arange(6)), COUNTS)
    for row, fields in enumerate(rows):
        own = slice(row, row + 1)
        expected = sample(logits[own], keys[own], Sampling(**fields), seen[own])
        assert drawn[own].tolist() == expected.tolist(), fields
    np.testing.assert_allclose(chances, logprobs(logits, drawn), rtol=1e-6)


def test_greedy_rows_need_nothing_else(arrays):
    logits, _ = arrays
    drawn, *_ = compiled(logits, settings_of([{}] * 6), COUNTS, None)
    np.testing.assert_array_equal(drawn, logits.argmax(-1))


def test_candidates_are_told_where_a_row_wants_some(arrays):
    logits, seen = arrays
    assert compiled(logits, settings_of([{}] * 6), COUNTS, None).candidates is None
    settings = settings_of(ROWS)
    assert not compiled(logits, settings, COUNTS, seen).candidates[0].any()
    settings.candidates[2] = 3
    ids, chances = compiled(logits, settings, COUNTS, seen).candidates
    order = np.argsort(-np.asarray(logits), axis=1)[:, :CANDIDATES]
    np.testing.assert_array_equal(ids, order)
    expected = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), order, 1)
    np.testing.assert_allclose(chances, expected, rtol=1e-5)


def test_short_rows_draw_no_stop_id(arrays):
    logits, seen = arrays
    best = np.asarray(logits.argmax(-1))
    settings = settings_of([{}] * 6)
    settings.stop_ids[:, 0] = best
    settings.least[:3] = 10
    drawn, *_ = compiled(logits, settings, COUNTS, seen)
    assert (np.asarray(drawn) == best).tolist() == [False] * 3 + [True] * 3


def test_rows_end_for_three_reasons():
    settings = dataclasses.replace(RowSettings.usual(4), most=np.array([9, 2, 9, 9]))
    settings.stop_ids[0, 3] = 5
    chances = jnp.array([0.0, 0.0, jnp.nan, 0.0])
    ended = is_end(jnp.array([5, 1, 1, 1]), chances, settings, jnp.full(4, 2))
    assert ended.tolist() == [True, True, True, False]


def test_a_stop_id_can_be_drawn_as_soon_as_the_least_tokens_are_there():
    logits = jnp.tile(jnp.asarray([0.0, 1, 9, 2]), (3, 1))
    settings = settings_of([{"least": 3}] * 3)
    settings.stop_ids[:, 0] = 2
    drawn, *_ = draw(logits, settings, jnp.asarray([1, 2, 3]), jnp.zeros((3, 4), bool))
    assert drawn.tolist() == [3, 3, 2]
