from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import device
from mpjax.kernels.optimized_once import optimized_once

pytestmark = pytest.mark.skipif(not hasattr(jax, "Inline"), reason="JAX 0.12 has it")


@optimized_once("power")
def _raised(x: jax.Array, *, power: int) -> jax.Array:
    return jnp.tanh(x) ** power


def _twice(x: jax.Array) -> jax.Array:
    return _raised(_raised(x, power=3), power=3)


def test_alike_calls_are_one_function_on_a_cpu_alone():
    x = jnp.linspace(0.0, 1, 5)
    text = jax.jit(_twice).lower(x).as_text()
    assert text.count("stablehlo.tanh") == 1
    assert text.count("call @_raised") == 2
    with device.described_as():
        text = jax.jit(lambda x: _twice(x)).lower(x).as_text()
    assert (text.count("stablehlo.tanh"), text.count("call @_raised")) == (2, 0)
    np.testing.assert_allclose(jax.jit(_twice)(x), jnp.tanh(jnp.tanh(x) ** 3) ** 3, rtol=1e-6)
