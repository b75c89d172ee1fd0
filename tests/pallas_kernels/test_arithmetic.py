from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import arithmetic
from tests.pallas_kernels.oracles import NUMPY_DTYPES

each_scale_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])


def all_scales(dtype: str) -> np.ndarray:
    """float32, from 1e-8 to 1e8; some, where there are too many."""
    if dtype == "float32":
        return (10 ** np.random.default_rng(0).uniform(-8, 8, 100_000)).astype(np.float32)
    scales = np.arange(2**15, dtype=np.uint16).view(NUMPY_DTYPES[dtype]).astype(np.float32)
    return scales[(scales > 1e-8) & (scales < 1e8)]


def assert_divided(quotients: jax.Array, scales: np.ndarray) -> None:
    """2 / scale, bit for bit; of 100,000 that no 16-bit dtype holds, all but a few."""
    expected = np.float32(2) / scales
    off = np.asarray(quotients).view(np.int32) - expected.view(np.int32)
    assert np.abs(off).max() <= 1
    assert np.count_nonzero(off) <= (5 if len(scales) == 100_000 else 0)


@each_scale_dtype
@pytest.mark.parametrize("units", [-2, -1, 0, 1, 2])
def test_division_corrects_a_quotient_that_is_off(units, dtype, monkeypatch):
    def divide(numerator, denominator):
        bits = jax.lax.bitcast_convert_type(numerator / denominator, jnp.int32) + units
        return jax.lax.bitcast_convert_type(bits, jnp.float32)

    monkeypatch.setattr(jnp, "divide", divide)
    scales = all_scales(dtype)
    assert_divided(arithmetic.divide(jnp.full(scales.shape, 2.0), jnp.asarray(scales)), scales)


@pytest.mark.gpu
@each_scale_dtype
def test_division_on_the_gpu(dtype):
    scales = all_scales(dtype)
    divide = jax.jit(arithmetic.divide)
    assert_divided(divide(jnp.full(scales.shape, 2.0), jnp.asarray(scales)), scales)


@pytest.mark.parametrize("axis", [-1, (0, 2)])
def test_the_largest_magnitude_of_numbers(axis, rng):
    x = rng.standard_normal((2, 3, 4096)).astype(np.float32)
    found = arithmetic.largest_magnitude(jnp.asarray(x), axis)
    np.testing.assert_array_equal(found, np.abs(x).max(axis))


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_the_largest_magnitude_passes_over_nothing(value, transform):
    """Rows are so wide that maxima of floats pass over NaN on a CPU."""
    x = np.ones((3, 4096), np.float32)
    x[1, 7] = value
    found = transform(lambda x: arithmetic.largest_magnitude(x, -1))(jnp.asarray(x))
    np.testing.assert_array_equal(found, [1, np.nan, 1])


def test_division_by_next_to_nothing_is_infinite():
    assert arithmetic.divide(jnp.array(2.0), jnp.array(2.0**-127)) == np.inf


def test_the_power_of_two_above(rng):
    x = np.exp2(rng.uniform(-112, 126, 10_000)).astype(np.float32)
    x[:4] = 1, 2, np.nextafter(np.float32(2), np.float32(0)), 2.0**-112
    power, inverse = (np.asarray(y) for y in arithmetic.power_above(jnp.asarray(x)))
    np.testing.assert_array_equal(power, np.exp2(np.floor(np.log2(x.astype(np.float64))) + 1))
    np.testing.assert_array_equal(power * inverse, 1)


@pytest.mark.parametrize("x", [0.0, 2.0**-140, 2.0**-120, 3e38, np.inf, np.nan])
def test_there_is_always_a_power_of_two(x):
    power, inverse = arithmetic.power_above(jnp.float32(x))
    assert np.frexp(float(power))[0] == np.frexp(float(inverse))[0] == 0.5
    assert power * inverse == 1
    assert power >= 2.0**-111  # what is multiplied by it must not vanish
    assert (power == 1) or x != 0
