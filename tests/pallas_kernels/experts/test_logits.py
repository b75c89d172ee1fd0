from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import RouterLogits, Routing, route


def test_it_is_the_arguments_of_a_routing(rng):
    logits, correction, bias = (jnp.asarray(rng.standard_normal(n)) for n in ((5, 8), 8, 8))
    own = RouterLogits(logits, Routing(3), correction, bias)
    for one, other in zip(own.route(), route(logits, Routing(3), correction, bias), strict=True):
        np.testing.assert_array_equal(one, other)


def test_it_is_a_tree_of_arrays():
    own = RouterLogits(jnp.zeros((5, 8)), Routing(3), None, jnp.zeros(8))
    assert [leaf.shape for leaf in jax.tree.leaves(own)] == [(5, 8), (8,)]
    assert jax.tree.map(lambda x: x + 1, own).routing == Routing(3)


def test_what_it_is_not():
    with pytest.raises(ValueError, match="RouterLogits: routing is 3: expected a Routing"):
        RouterLogits(jnp.zeros((5, 8)), 3)
    read = RouterLogits([[1.0, 2.0]], Routing(1)).read("an operation")
    assert read.logits.shape == (1, 2)
    with pytest.raises(ValueError, match="an operation: bias"):
        RouterLogits([[1.0, 2.0]], Routing(1), bias="no").read("an operation")
