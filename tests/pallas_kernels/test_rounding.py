from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mpjax.kernels.rounding import narrow, round_to
from tests.pallas_kernels.oracles import NUMPY_DTYPES


@pytest.mark.parametrize("transform", [jax.jit, lambda function, **_: function])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_equals_casting_there_and_back(dtype, transform, rng):
    values = rng.standard_normal(50_000) * 10 ** rng.uniform(-9, 4, 50_000)
    ties = np.arange(1, 4096) * 2.0**-25  # float16's subnormals, and halfway between them
    edges = [0.0, -0.0, 2.0**-14, 65504, 65519, -65519, 6.0e-5]
    values = np.concatenate([values, ties, -ties, edges]).astype(np.float32)
    expected = values.astype(NUMPY_DTYPES[dtype]).astype(np.float32)
    rounded = np.asarray(transform(round_to, static_argnums=1)(jnp.asarray(values), dtype))
    np.testing.assert_array_equal(rounded.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("transform", [jax.jit, lambda function, **_: function])
def test_eight_bits_without_infinities(transform, rng):
    """All values of e4m3fn, what lies halfway between them, and what doesn't."""
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    codes = np.sort(codes[np.isfinite(codes)])
    values = [codes, (codes[1:] + codes[:-1]) / 2, rng.uniform(-448, 448, 1000), [1e-6, -1e-4]]
    values = np.concatenate(values).astype(np.float32)
    expected = values.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    rounded = transform(round_to, static_argnums=1)(jnp.asarray(values), jnp.float8_e4m3fn)
    np.testing.assert_array_equal(np.asarray(rounded).view(np.uint32), expected.view(np.uint32))


def test_overflows_to_infinity():
    rounded = round_to(jnp.array([65520.0, -1e6]), jnp.float16)
    np.testing.assert_array_equal(rounded, [np.inf, -np.inf])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_narrow_is_a_cast_that_stays(dtype, rng):
    x = jnp.asarray(rng.standard_normal(1000).astype(np.float32))
    there, back = jax.jit(lambda x: (narrow(x, dtype), narrow(x, dtype).astype(jnp.float32)))(x)
    expected = np.asarray(x).astype(NUMPY_DTYPES.get(dtype, dtype))
    np.testing.assert_array_equal(np.asarray(there), expected)
    np.testing.assert_array_equal(back, expected.astype(np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_it_differentiates_as_the_identity(dtype):
    """Also at zero and among float16's subnormals, which are rounded in steps."""
    x = jnp.array([0.0, 1e-7, 3e-5, 1.0, -300.0])
    gradient = jax.grad(lambda x: (narrow(x, dtype).astype(jnp.float32) * 3).sum())(x)
    np.testing.assert_array_equal(gradient, np.full(5, 3.0))
