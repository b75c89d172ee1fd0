from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from mpjax.models.spread_linear import SpreadLinear
from tests.models.test_row_linear import on_one_device, random


def test_experts_are_places_in_the_stack():
    """The first of the devices has the first experts."""
    experts = np.array([[0, 3], [2, 1]], np.int32)
    linear = SpreadLinear(random(3, 8, 4), None, "model")
    found = on_one_device(linear, experts, lambda linear, x: linear.own(x).numbers)
    np.testing.assert_array_equal(found, [[0, -1], [2, 1]])
    total = on_one_device(linear, experts, lambda linear, x: jnp.asarray(linear.own(x).total))
    assert total == 3


def test_terms_of_all_devices_become_one():
    linear, terms = SpreadLinear(random(3, 8, 4), None, "model"), random(2, 5, 4)
    found = on_one_device(linear, terms, lambda linear, x: linear.add_shares(x, x.dtype))
    np.testing.assert_allclose(found, terms.sum(0)[None], rtol=1e-6)
