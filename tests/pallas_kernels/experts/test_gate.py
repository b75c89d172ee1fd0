from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import Gate

GATES, UPS = (jnp.linspace(-12, 12, 25, dtype=jnp.float32) * sign for sign in (1, -1))


def test_without_a_limit_it_is_silu():
    gate, up = (np.asarray(x, np.float64) for x in (GATES, UPS))
    np.testing.assert_allclose(Gate()(GATES, UPS), gate / (1 + np.exp(-gate)) * up, atol=1e-5)


def test_with_a_limit_it_is_the_clamped_swiglu():
    gate, up = (np.asarray(x, np.float64) for x in (GATES, UPS))
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)  # before one is added
    expected = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
    np.testing.assert_allclose(Gate(7.0, 1.702)(GATES, UPS), expected, atol=1e-5)


@pytest.mark.parametrize("fields", [{"limit": -1.0}, {"alpha": 0}, {"limit": "7"}])
def test_numbers_are_positive(fields):
    [name] = fields
    with pytest.raises(ValueError, match=f"^Gate: {name} is .*: expected a positive number"):
        Gate(**fields)
