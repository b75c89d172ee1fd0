"""Accepted tokens and the one behind them have the model's distribution."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.random_keys import row_keys, step_keys
from mpjax.speculation.acceptance import DRAFTING, accept, count_agreeing, draw
from mpjax.speculation.proposer import Proposal

pytestmark = pytest.mark.any_version

ROWS, VOCABULARY, K = 30_000, 5, 2
# Distributions of the model, and of a draft that is wrong about them; one token is only the draft's
# and one only the model's.
P = np.array([[0.5, 0.2, 0.2, 0.1, 0], [0.1, 0.6, 0.1, 0.2, 0], [0.3, 0.3, 0.3, 0.1, 0]])
Q = np.array([[0.2, 0.2, 0.3, 0, 0.3], [0.4, 0.3, 0.1, 0.2, 0]])


@pytest.fixture(scope="module")
def accepted() -> tuple[np.ndarray, np.ndarray]:
    """Tokens [rows, k + 1] and accepted numbers, of many rows; odd ones are proposed one token."""
    keys = row_keys(np.arange(ROWS))

    @jax.jit
    def run(keys):
        p, q = (jnp.tile(jnp.asarray(x, jnp.float32), (ROWS, 1, 1)) for x in (P, Q))
        drafts = [draw(q[:, j], step_keys(step_keys(keys, 7 + j), DRAFTING)) for j in range(K)]
        counts = K - jnp.arange(ROWS, dtype=jnp.int32) % 2
        proposal = Proposal(jnp.stack(drafts, 1), counts, q)
        return accept(p, proposal, keys, jnp.full(ROWS, 7, jnp.int32))

    tokens, number = run(keys)
    return np.asarray(tokens), np.asarray(number)


def chi_squared(tokens: np.ndarray, p: np.ndarray) -> float:
    """Above 1 with a chance below 1e-5, if tokens come from p."""
    found, wanted = np.bincount(tokens, minlength=VOCABULARY), p * len(tokens)
    assert not found[p == 0].any()
    possible = p > 0
    statistic = ((found - wanted)[possible] ** 2 / wanted[possible]).sum()
    return statistic / 28  # of 3 or 4 degrees of freedom


def test_each_position_has_the_models_distribution(accepted):
    tokens, number = accepted
    for position in range(K + 1):
        reached = tokens[number >= position, position]
        assert len(reached) > 2000
        assert chi_squared(reached, P[position]) < 1
        assert chi_squared(reached, P[(position + 1) % 3]) > 1, "the test can't fail"


def test_as_many_are_accepted_as_the_distributions_overlap(accepted):
    _, number = accepted
    for parity, limit in ((0, K), (1, 1)):
        mine = number[parity::2]
        overlap = np.minimum(P[:K], Q).sum(axis=1)
        rates = [(mine >= n).mean() for n in (1, 2)]
        assert mine.max() == limit
        assert rates[0] == pytest.approx(overlap[0], abs=0.015)
        if limit == K:
            assert rates[1] == pytest.approx(overlap[0] * overlap[1], abs=0.015)


def test_equal_distributions_accept_everything():
    p = jnp.full((4, 2, 3), 1 / 3, jnp.float32)
    proposal = Proposal(
        jnp.array([[0], [1], [2], [0]], jnp.int32), jnp.array([1, 1, 1, 0]), p[:, :1]
    )
    tokens, number = accept(p, proposal, row_keys(range(4)), jnp.zeros(4, jnp.int32))
    assert number.tolist() == [1, 1, 1, 0]
    assert tokens[:3, 0].tolist() == [0, 1, 2]
    assert tokens.shape == (4, 2)


def test_certain_tokens_stay_until_another_is_drawn():
    proposal = Proposal(jnp.array([[5, 6], [5, 6], [5, 6], [5, 6]]), jnp.array([2, 2, 1, 2]))
    drawn = jnp.array([[5, 6, 9], [5, 9, 6], [5, 6, 9], [9, 6, 9]])
    assert count_agreeing(drawn, proposal).tolist() == [2, 1, 1, 0]
