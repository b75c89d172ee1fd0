from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mpjax.quantization.learning.descent import Learning, descend

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


def test_steps_go_against_the_gradient_at_a_rate_that_falls_to_zero():
    seen = []

    def watched(parameters, index):
        seen.append(np.asarray(parameters["x"]))
        return {"x": jnp.asarray([-3.0, 0.5])}  # of a constant one, Adam takes the sign

    descend(Learning(2, 0.25), {"x": jnp.zeros(2)}, 2, watched, total)
    steps = np.diff(seen, axis=0)
    np.testing.assert_allclose(steps, np.outer([0.25, 0.1875, 0.125], [1, -1]), rtol=1e-4)


@given(st.lists(st.sampled_from([1.0, 2.0, 3.0, 4.0, math.nan]), min_size=2, max_size=6))
@example([3.0, 1.0, 4.0, 2.0])
def test_the_best_of_all_ends_of_epochs_is_kept(losses):
    """Not the last that is better than the one before it; the first of equal ones."""
    losses[0] = 3.0
    points, left = [], iter(losses)

    def total(parameters):
        points.append(np.asarray(parameters["x"]))
        return next(left)

    best, totals = descend(Learning(len(losses) - 1, 0.9), {"x": jnp.zeros(2)}, 2, gradient, total)
    np.testing.assert_array_equal(totals, losses)
    np.testing.assert_array_equal(best["x"], points[int(np.nanargmin(losses))])
