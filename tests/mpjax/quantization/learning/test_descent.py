from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.quantization.learning.descent import Learning, descend, mean

pytestmark = pytest.mark.any_version

CENTRES = jnp.asarray([[1.0, -2.0], [3.0, 0.5], [2.0, 1.5]])


def gradient(parameters, index):
    return {"x": 2 * (parameters["x"] - CENTRES[index])}


def total(parameters):
    return float(((parameters["x"][None] - CENTRES) ** 2).sum())


def test_it_comes_near_the_least_loss():
    steps = []
    start = {"x": jnp.zeros(2)}
    best, totals = descend(Learning(200, 0.05), start, 3, gradient, total, steps.append)
    np.testing.assert_allclose(best["x"], CENTRES.mean(0), atol=0.02)
    assert len(totals) == 201
    assert total(best) == min(totals)
    assert sum(steps) == 600


def test_the_first_step_is_the_rate_against_the_gradient():
    seen = []

    def watched(parameters, index):
        seen.append(parameters["x"])
        return gradient(parameters, index)

    descend(Learning(1, 0.25), {"x": jnp.zeros(2)}, 3, watched, total)
    np.testing.assert_allclose(seen[1], [0.25, -0.25], rtol=1e-5)


def test_the_best_is_kept():
    start = {"x": CENTRES.mean(0)}
    best, totals = descend(Learning(2, 0.9), start, 3, gradient, total)
    assert min(totals[1:]) > totals[0]
    np.testing.assert_array_equal(best["x"], start["x"])


def test_a_mean_of_sums():
    pairs = [(jnp.float32(6), jnp.float32(2)), (jnp.float32(3), jnp.float32(1))]
    assert mean(pairs) == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"epochs": 0}, "epochs is 0: expected 1 or more"),
        ({"rate": 0}, "rate is 0: expected more than 0"),
        ({"rate": 1.0}, "below 1"),
        ({"rate": "fast"}, "rate is 'fast': expected a number"),
        ({"rate": True}, "rate is True: expected a number"),
        ({"table": 3}, "table"),
    ],
)
def test_fields_are_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        Learning(**fields)
