"""Rows wait longer the more of their proposals are refused."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.generation.speculation.backoff import Backoff

pytestmark = pytest.mark.any_version


def test_a_row_waits_longer_after_each_refusal_until_a_token_is_accepted():
    backoff, known, waits = Backoff.create(2), jnp.array([10, 10]), []
    four = jnp.array([4, 4])
    for _ in range(6):
        backoff = backoff.settled(known, four, jnp.array([0, 1]))
        known = backoff.resume.at[1].set(10)
        waits.append(int(backoff.resume[0]))
        assert backoff.is_over(known).all()
        assert backoff.is_over(known - 1).tolist() == [False, True]
    steps = np.diff([10, *waits])
    assert steps.tolist() == [1, 3, 7, 15, 15, 15]
    backoff = backoff.settled(known, four, jnp.array([1, 0]))
    assert backoff.refused.tolist() == [0, 1]
    backoff = backoff.settled(known, four, jnp.array([0, 0]))
    assert (backoff.resume - known).tolist() == [1, 3]


def test_a_row_that_was_proposed_nothing_keeps_its_state():
    backoff = Backoff(jnp.array([3]), jnp.array([40]))
    same = backoff.settled(jnp.array([20]), jnp.array([0]), jnp.array([0]))
    assert (same.refused.tolist(), same.resume.tolist()) == ([3], [40])


def test_an_ngram_proposes_nothing_to_rows_that_wait():
    """Though their text repeats itself."""
    history = jnp.tile(jnp.array([5, 6, 7]), (2, 4))
    context = type("Context", (), {})()
    context.history, context.known = history, jnp.array([9, 9])
    context.most = jnp.array([4, 4])
    own = Backoff(jnp.array([2, 2]), jnp.array([10, 9]))
    context.state = type("State", (), {"speculation": type("Speculation", (), {"own": own})})
    proposal, after = mpjax.Ngram().propose(context)
    assert proposal.counts.tolist() == [0, 4]
    assert after is own
