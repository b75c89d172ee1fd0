"""What is drawn at several positions is what steps of one token would draw."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.generation.speculation.proposer import Proposal
from mpjax.generation.speculation.verification import distribution, verify
from mpjax.generation.state import State
from mpjax.sampling.draw import process_logits
from mpjax.sampling.settings import RowSettings, Sampling

pytestmark = pytest.mark.any_version


@pytest.mark.parametrize("has_probabilities", [False, True])
def test_no_stop_token_is_drawn_before_the_minimum(has_probabilities):
    """Though it is nearly certain; the second row has its minimum with the token before."""
    logits = jnp.tile(jnp.asarray([0.0, 1, 30, 2]), (2, 2, 1))
    probabilities = jnp.full((2, 1, 4), 0.25) if has_probabilities else None
    proposal = Proposal(jnp.full((2, 1), 2, jnp.int32), jnp.ones(2, jnp.int32), probabilities)
    counts = jnp.asarray([4, 5], jnp.int32)
    sampling = Sampling(temperature=1.0, min_new_tokens=5, stop_ids=[2])
    settings = RowSettings.of([sampling], 2, max_new_tokens=9)
    state = State(None, counts, counts, counts > 0, settings)
    drawn, accepted = verify(logits, proposal, state, divided=False)
    assert drawn.tokens[0, 0] != 2
    assert accepted.tolist() == [0, 1]
    assert drawn.tokens[1].tolist() == [2, 2]


def test_a_greedy_row_is_certain_of_its_likeliest_token():
    logits = jnp.array([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0]])
    settings = RowSettings.of([Sampling(temperature=np.array([0, 2.0]), top_k=2)], 2)
    found = distribution(logits, settings)
    assert found[0].tolist() == [0, 1, 0]
    drawn_from = np.exp(np.asarray(process_logits(logits, settings)[1]))
    np.testing.assert_allclose(found[1], drawn_from / drawn_from.sum(), rtol=1e-5)
    assert found[1, 0] == 0
