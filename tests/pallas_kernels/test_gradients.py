from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from mpjax.kernels.gradients import with_gradients_of

pytestmark = pytest.mark.any_version


def test_values_are_the_kernels_and_derivatives_the_references():
    def run(x, y):
        return with_gradients_of(lambda x, y: x * y, lambda x, y: jnp.float32(7.0), x, y)

    value, gradients = jax.value_and_grad(run, (0, 1))(jnp.float32(2.0), jnp.float32(3.0))
    assert value == 7.0
    assert gradients == (3.0, 2.0)
