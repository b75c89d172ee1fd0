"""What is drawn at several positions is what steps of one token would draw."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.decoding_state import DecodingState, Limits
from mpjax.decoding_step import BatchRule
from mpjax.random_keys import row_keys
from mpjax.sampling import Sampling, process_logits
from mpjax.speculation.proposer import Proposal
from mpjax.speculation.verification import distribution, seen_before, verify

pytestmark = pytest.mark.any_version


def test_a_position_has_seen_the_proposed_tokens_before_it():
    seen = jnp.array([[True, False, False, False], [False] * 4])
    found = seen_before(seen, jnp.array([[2, 3], [1, 1]], jnp.int32))
    assert found.astype(int).tolist() == [
        [[1, 0, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]],
        [[0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0]],
    ]
    assert seen_before(None, jnp.zeros((2, 2), jnp.int32)) is None


@pytest.mark.parametrize("has_chances", [False, True])
def test_no_stop_token_is_drawn_before_the_minimum(has_chances):
    """Though it is nearly certain; the second row has its minimum with the token before."""
    logits = jnp.tile(jnp.asarray([0.0, 1, 30, 2]), (2, 2, 1))
    chances = jnp.full((2, 1, 4), 0.25) if has_chances else None
    proposal = Proposal(jnp.full((2, 1), 2, jnp.int32), jnp.ones(2, jnp.int32), chances)
    nothing, cache = jnp.zeros((2, 9), jnp.int32), None
    counts = jnp.asarray([4, 5], jnp.int32)
    state = DecodingState(
        *(cache, row_keys([0, 1]), nothing, nothing.astype(jnp.float32), counts),
        finished=jnp.zeros(2, bool),
        seen=None,
        step=jnp.int32(5),
    )
    rule = BatchRule(Sampling(temperature=1.0, min_new_tokens=5), Limits.of(2, [2], 9, 9))
    drawn, accepted = verify(logits, proposal, state, rule, divided=False)
    assert drawn.tokens[0, 0] != 2
    assert accepted.tolist() == [0, 1]
    assert drawn.tokens[1].tolist() == [2, 2]


def test_a_greedy_row_is_certain_of_its_likeliest_token():
    logits = jnp.array([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0]])
    sampling = Sampling(temperature=np.array([0, 2.0]), top_k=2)
    found = distribution(logits, sampling, None)
    assert found[0].tolist() == [0, 1, 0]
    drawn_from = np.exp(np.asarray(process_logits(logits, sampling)[1]))
    np.testing.assert_allclose(found[1], drawn_from / drawn_from.sum(), rtol=1e-5)
    assert found[1, 0] == 0
