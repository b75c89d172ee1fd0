"""Arithmetic, rounding and codes in words."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import arithmetic, bits
from mpjax.kernels.rounding import narrow, round_to
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


@pytest.mark.parametrize("x", [0.0, 2.0**-140, 2.0**-120, 3e38, np.inf, np.nan])
def test_there_is_always_a_power_of_two(x):
    power, inverse = arithmetic.power_above(jnp.float32(x))
    assert np.frexp(float(power))[0] == np.frexp(float(inverse))[0] == 0.5
    assert power * inverse == 1
    assert power >= 2.0**-111  # what is multiplied by it must not vanish
    assert (power == 1) or x != 0


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


ALL_WORDS = np.arange(2**16, dtype=np.uint16)

each_width = pytest.mark.parametrize("width", [2, 4, 8])
each_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


@each_width
def test_all_words_unpack_to_their_planes_and_pack_again(width):
    codes = np.asarray(bits.unpack_planes(jnp.asarray(ALL_WORDS), width))
    assert codes.dtype == np.uint8
    assert codes.shape == (16 // width, 2**16)
    for plane in range(16 // width):
        np.testing.assert_array_equal(codes[plane], ALL_WORDS // 2 ** (plane * width) % 2**width)
    np.testing.assert_array_equal(bits.pack_planes(jnp.asarray(codes), width), ALL_WORDS)


@pytest.fixture(params=["twin", "interpreted_ptx"])
def ptx(request: pytest.FixtureRequest) -> bool:
    """Whether inline PTX runs, which numpy then interprets; tests run with it and with the twin."""
    if request.param == "interpreted_ptx":
        request.getfixturevalue("interpreted_ptx")
    return request.param == "interpreted_ptx"


def factors(rng: np.random.Generator, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """All finite values of a dtype, each with a random scale that keeps it a normal number."""
    values = ALL_WORDS.view(NUMPY_DTYPES[dtype])
    with np.errstate(invalid="ignore"):
        magnitude = np.abs(values.astype(np.float32))
    info = jnp.finfo(dtype)
    is_normal = (magnitude >= 4 * float(info.tiny)) & (magnitude <= float(info.max) / 4)
    values = np.where(is_normal, values, np.copysign(np.zeros_like(values), values))
    scales = rng.uniform(0.25, 4, values.shape) * rng.choice([-1, 1], values.shape)
    return values, scales.astype(NUMPY_DTYPES[dtype])


def assert_products_round_once(products: jax.Array, values: np.ndarray, scales: np.ndarray) -> None:
    exact = values.astype(np.float32) * scales.astype(np.float32)  # 22 bits at most
    expected = exact.astype(values.dtype)
    assert products.dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(products).view(np.uint16), expected.view(np.uint16))


@each_dtype
def test_multiply_rounds_once(dtype, ptx, rng):
    values, scales = factors(rng, dtype)
    products = bits.multiply(jnp.asarray(values), jnp.asarray(scales))
    assert_products_round_once(products, values, scales)
