"""Accepted tokens and the one behind them have the model's distribution."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.generation.speculation.acceptance import accept, count_agreeing
from mpjax.generation.speculation.drafting import Drafting
from mpjax.generation.speculation.proposer import Proposal
from mpjax.sampling.random_keys import row_keys
from mpjax.sampling.settings import RowSettings, Sampling

pytestmark = pytest.mark.any_version

# With so many rows, a draft that draws with the model's own keys is far beyond the limit.
ROWS, VOCABULARY, K = 100_000, 5, 2
# Distributions of the model, and of a draft that is wrong about them; one token is only the draft's
# and one only the model's.
P = np.array([[0.5, 0.2, 0.2, 0.1, 0], [0.1, 0.6, 0.1, 0.2, 0], [0.3, 0.3, 0.3, 0.1, 0]])
Q = np.array([[0.2, 0.2, 0.3, 0, 0.3], [0.4, 0.3, 0.1, 0.2, 0]])


@pytest.fixture(scope="module")
def accepted() -> tuple[np.ndarray, np.ndarray]:
    """Tokens [rows, k + 1] and accepted numbers of a draft's proposals; odd rows get one token."""
    keys, drawn = row_keys(np.arange(ROWS)), jnp.full(ROWS, 7, jnp.int32)
    cache: Any = None

    def context():
        return SimpleNamespace(
            state=SimpleNamespace(counts=drawn, processors=()),
            settings=RowSettings.of([Sampling(temperature=1.0)], ROWS),
            most=drawn,
            vocabulary=VOCABULARY,
        )

    @jax.jit
    def draft(drafting, number, q):
        logits = jnp.tile(jnp.log(q), (ROWS, 1))
        return drafting.draw(logits, context(), number, divided=False)[0]

    drafting = Drafting.begin(context(), cache, K)
    for number, q in enumerate(Q):
        drafting = draft(drafting, jnp.int32(number), jnp.asarray(q, jnp.float32))
    p = jnp.tile(jnp.asarray(P, jnp.float32), (ROWS, 1, 1))
    counts = K - jnp.arange(ROWS, dtype=jnp.int32) % 2
    proposal = Proposal(drafting.tokens, counts, drafting.probabilities)
    tokens, number = jax.jit(accept)(p, proposal, keys, drawn)
    return np.asarray(tokens), np.asarray(number)


def surprise(tokens: np.ndarray, distributions: Sequence[np.ndarray]) -> float:
    """How many standard deviations texts [rows, length] are from independent tokens, by χ²."""
    expected = functools.reduce(np.multiply.outer, distributions).ravel()
    places = tokens @ VOCABULARY ** np.arange(len(distributions) - 1, -1, -1)
    found, possible = np.bincount(places, minlength=len(expected)), expected > 0
    assert not found[~possible].any()
    wanted = expected[possible] * len(tokens)
    statistic = ((found[possible] - wanted) ** 2 / wanted).sum()
    degrees = len(wanted) - 1
    return (statistic - degrees) / np.sqrt(2 * degrees)


@pytest.mark.parametrize("count", range(K + 1))
def test_texts_have_the_models_distribution(accepted, count):
    """The accepted tokens and the one behind them, of rows with `count` accepted ones or more."""
    tokens, number = accepted
    reached = tokens[number >= count, : count + 1]
    assert len(reached) > ROWS / 10
    overlaps = [np.minimum(p, q) / np.minimum(p, q).sum() for p, q in zip(P, Q, strict=False)]
    assert surprise(reached, [*overlaps[:count], P[count]]) < 5
    assert surprise(reached, [*overlaps[:count], P[(count + 1) % 3]]) > 50, "the test can't fail"


def test_as_many_are_accepted_as_the_distributions_overlap(accepted):
    _, number = accepted
    for parity, limit in ((0, K), (1, 1)):
        mine = number[parity::2]
        overlap = np.minimum(P[:K], Q).sum(axis=1)
        rates = [(mine >= n).mean() for n in (1, 2)]
        assert mine.max() == limit
        assert rates[0] == pytest.approx(overlap[0], abs=0.008)
        if limit == K:
            assert rates[1] == pytest.approx(overlap[0] * overlap[1], abs=0.008)


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
