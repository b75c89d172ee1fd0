"""What is drawn at several positions is what steps of one token would draw."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.sampling import Sampling, process_logits
from mpjax.speculation.verification import distribution, seen_before

pytestmark = pytest.mark.any_version


def test_a_position_has_seen_the_proposed_tokens_before_it():
    seen = jnp.array([[True, False, False, False], [False] * 4])
    found = seen_before(seen, jnp.array([[2, 3], [1, 1]], jnp.int32))
    assert found.astype(int).tolist() == [
        [[1, 0, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]],
        [[0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0]],
    ]
    assert seen_before(None, jnp.zeros((2, 2), jnp.int32)) is None


def test_a_greedy_row_is_certain_of_its_likeliest_token():
    logits = jnp.array([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0]])
    sampling = Sampling(temperature=np.array([0, 2.0]), top_k=2)
    found = distribution(logits, sampling, None)
    assert found[0].tolist() == [0, 1, 0]
    drawn_from = np.exp(np.asarray(process_logits(logits, sampling)[1]))
    np.testing.assert_allclose(found[1], drawn_from / drawn_from.sum(), rtol=1e-5)
    assert found[1, 0] == 0
