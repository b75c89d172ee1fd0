from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.threshold import kth_largest, nucleus


@pytest.fixture(scope="module")
def logits() -> jax.Array:
    rows = np.random.default_rng(0).standard_normal((3, 200)).astype(np.float32) * 5
    rows[1, :50] = rows[1, 50]  # ties
    rows[2, :5] = [-np.inf, 0.0, -0.0, 1e-38, -1e-38]
    return jnp.asarray(rows)


def test_the_kth_largest_is_that_of_a_sort(logits):
    ranked = np.sort(np.asarray(logits), axis=-1)[:, ::-1]
    find = jax.jit(kth_largest)
    for k in (1, 2, 60, 200):
        found = find(logits, jnp.full((1, 1), k, jnp.int32))
        np.testing.assert_array_equal(found[:, 0], ranked[:, k - 1])


def test_each_row_has_its_own_k_and_all_tokens_are_the_most(logits):
    ranked = np.sort(np.asarray(logits), axis=-1)[:, ::-1]
    found = kth_largest(logits, jnp.asarray([[3], [1000], [7]], jnp.int32))
    np.testing.assert_array_equal(found[:, 0], [ranked[0, 2], ranked[1, -1], ranked[2, 6]])


def test_the_nucleus_is_the_smallest_set_of_that_mass():
    probabilities = jnp.asarray([[0.1, 0.4, 0.3, 0.2]], jnp.float32)
    logits = jnp.log(probabilities)
    find = jax.jit(nucleus)
    for mass, least in ((0.3, 1), (0.6, 2), (0.75, 3), (0.95, 0)):
        found = find(logits, probabilities, jnp.full((1, 1), mass, jnp.float32))
        assert found[0, 0] == logits[0, least]


def test_a_mass_that_rounding_leaves_out_of_reach_keeps_all():
    logits = jnp.zeros((1, 4))
    assert nucleus(logits, jnp.full((1, 4), 0.24), jnp.ones((1, 1)))[0, 0] == -jnp.inf
