from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.evaluation.divergence import divergence

pytestmark = pytest.mark.any_version


def test_it_is_the_sum_of_its_definition(rng):
    expected, found = rng.dirichlet(np.ones(7), (2, 3)), rng.dirichlet(np.ones(7), (2, 3))
    sums = (expected * np.log(expected / found)).sum(-1)
    logs = (jnp.asarray(np.log(array), jnp.float32) for array in (expected, found))
    np.testing.assert_allclose(divergence(*logs), sums, rtol=1e-5)
