from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.drawing import draw
from mpjax.random_keys import row_keys
from mpjax.sampling import Sampling, logprobs, sample

pytestmark = pytest.mark.any_version


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.7, "top_k": 9}, {"repetition_penalty": 3.0}]
)
def test_tokens_are_drawn_with_their_logprobs(settings):
    """From the allowed ones, as `sample` does, also where devices have parts of the vocabulary."""
    logits = jax.random.normal(jax.random.key(0), (4, 40)) * 3
    allowed = logits.at[:, :20].set(-jnp.inf)
    keys, seen = row_keys(np.arange(4)), logits > 3
    expected = sample(allowed, keys, settings, seen)
    for divided in (False, True):
        found = draw(logits, allowed, keys, Sampling.of(settings), seen, divided=divided)
        np.testing.assert_array_equal(found[0], expected)
        np.testing.assert_allclose(found[1], logprobs(logits, expected), rtol=1e-5)
