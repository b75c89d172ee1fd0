"""Steps whose tokens may be taken back, in a model whose layers keep a state of each sequence."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.small import hybrid_model

BATCH, TOKENS = 4, 5


@pytest.fixture(scope="module")
def model():
    return hybrid_model()


def test_states_hold_the_tokens_that_are_kept(model):
    """`settle` keeps all, some or none of the tokens of rows with different counts."""
    rng = np.random.default_rng(0)
    before, tokens = (rng.integers(0, 50, (BATCH, TOKENS)) for _ in range(2))
    counts, kept = jnp.array([5, 5, 3, 0]), jnp.array([5, 2, 1, 0])
    cache = model.create_cache(BATCH, 32, "KV16", 16)
    cache = dataclasses.replace(cache, slots=jnp.array([2, 0, 1, 3]))

    @jax.jit
    def run(model, cache, counts, kept):
        _, cache = model.step(before, jnp.array([5, 1, 4, 0]), cache)
        read = model.step(tokens, counts, cache, every_position=True)
        logits, after = model.step(tokens, counts, cache, every_position=True, tentative=True)
        settled = model.settle(after, cache, kept)
        expected = model.step(tokens, kept, cache)[1]
        return read[0], logits, settled, expected, model.forget(settled, cache), cache

    read, logits, settled, expected, forgotten, begun = run(model, cache, counts, kept)
    for row, count in enumerate(counts):
        np.testing.assert_allclose(logits[row, :count], read[row, :count], rtol=1e-4, atol=1e-5)
    assert settled.lengths.tolist() == expected.lengths.tolist() == [10, 3, 5, 0]
    assert forgotten.lengths.tolist() == begun.lengths.tolist()
    for number, state in enumerate(settled.layers):
        pick = (lambda layer: layer[1]) if number == 1 else (lambda layer: layer)
        for own, other in zip(pick(state), pick(expected.layers[number]), strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)
        jax.tree.map(
            np.testing.assert_array_equal,
            pick(forgotten.layers[number]),
            pick(begun.layers[number]),
        )
