from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import arithmetic, backend
from tests.pallas_kernels.oracles import NUMPY_DTYPES, as_array, wide


def apply(operation, *tiles, dtype="float32", interpret=False):
    """An operation on whole tiles, in a kernel of its own."""

    def kernel(*references):
        *inputs, out = references
        place = tuple(jnp.meshgrid(*(jnp.arange(side) for side in out.shape), indexing="ij"))
        backend.store(out.at[place], operation(*(backend.load(ref.at[place]) for ref in inputs)))

    return backend.pallas_call(
        kernel,
        *tiles,
        out_shape=jax.ShapeDtypeStruct(tiles[0].shape, dtype),
        grid=(1,),
        name="arithmetic",
        warps=1,
        stages=1,
        interpret=interpret,
    )


@pytest.fixture
def values(rng):
    return as_array(rng.uniform(0.1, 9, (8, 32)) * rng.choice([-1, 1], (8, 32)), "float32")


ORACLES = {
    "exp2": np.exp2,
    "log2": lambda x: np.log2(np.abs(x)),
    "reciprocal": lambda x: 1 / x,
    "multiply_add": lambda x: x * x + x,
}


def call(kind, name):
    operation = getattr(kind, name)
    if name == "log2":
        return lambda x: operation(jnp.abs(x))
    return (lambda x: operation(x, x, x)) if name == "multiply_add" else operation


@pytest.mark.parametrize("name", ORACLES)
def test_plain(name, values):
    found = apply(call(arithmetic.PLAIN, name), values, interpret=True)
    np.testing.assert_allclose(found, ORACLES[name](wide(values)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_plain_narrowing(dtype, values):
    found = apply(lambda x: arithmetic.PLAIN.narrow(x, dtype), values, dtype=dtype, interpret=True)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(values).astype(NUMPY_DTYPES[dtype]))


@pytest.mark.parametrize(
    ("name", "instruction"),
    [
        ("exp2", "ex2.approx.ftz.f32"),
        ("log2", "lg2.approx.ftz.f32"),
        ("reciprocal", "rcp.approx.ftz.f32"),
        ("multiply_add", "fma.rn.f32"),
    ],
)
def test_lowers_to_one_instruction(name, instruction, lower_for_cuda):
    tile = jax.ShapeDtypeStruct((8, 32), jnp.float32)
    program = lower_for_cuda(lambda x: apply(call(arithmetic.PTX, name), x), tile)
    assert program.count(instruction) == 1


@pytest.mark.parametrize(("dtype", "suffix"), [("bfloat16", "bf16x2"), ("float16", "f16x2")])
def test_narrowing_lowers_to_one_instruction_for_two(dtype, suffix, lower_for_cuda):
    tile = jax.ShapeDtypeStruct((8, 32), jnp.float32)

    def narrow(x):
        return apply(lambda x: arithmetic.PTX.narrow(x, dtype), x, dtype=dtype)

    assert f"cvt.rn.{suffix}.f32" in lower_for_cuda(narrow, tile)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ORACLES)
def test_on_the_gpu(name, values):
    found = jax.jit(lambda x: apply(call(arithmetic.PTX, name), x))(values)
    np.testing.assert_allclose(found, ORACLES[name](wide(values)), rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_narrowing_on_the_gpu(dtype, values):
    narrow = jax.jit(lambda x: apply(lambda x: arithmetic.PTX.narrow(x, dtype), x, dtype=dtype))
    expected = np.asarray(values).astype(NUMPY_DTYPES[dtype])
    np.testing.assert_array_equal(np.asarray(narrow(values)), expected)


def all_finite(dtype):
    values = np.arange(2**16, dtype=np.uint16).view(NUMPY_DTYPES[dtype])
    return np.where(np.isfinite(values.astype(np.float32)), values, np.zeros_like(values))


def test_plain_widening():
    for dtype in NUMPY_DTYPES:
        values = all_finite(dtype)
        found = np.asarray(arithmetic.PLAIN.widen(jnp.asarray(values)))
        np.testing.assert_array_equal(found, values.astype(np.float32))


def test_widening_lowers_to_an_instruction_for_each(lower_for_cuda):
    def widen(x):
        return apply(arithmetic.PTX.widen, x, dtype=jnp.float32)

    program = lower_for_cuda(widen, jax.ShapeDtypeStruct((8, 32), jnp.bfloat16))
    assert program.count("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_widening_on_the_gpu(dtype):
    values = all_finite(dtype).reshape(256, 256)
    widen = jax.jit(lambda x: apply(arithmetic.PTX.widen, x, dtype=jnp.float32))
    np.testing.assert_array_equal(np.asarray(widen(jnp.asarray(values))), values.astype(np.float32))


@pytest.mark.parametrize("exponent", [133, -133, 64, 3, 0])
def test_powers_beyond_the_range_of_float32(exponent):
    """Not under jit, where XLA may make one factor of both."""
    x = jnp.asarray(np.array([1.5, -3.0], np.float32)) * 2.0 ** (-exponent // 2)
    found = arithmetic.times_power(x, exponent)
    np.testing.assert_array_equal(found, np.ldexp(np.asarray(x), exponent))


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
    """Of rows so wide that maxima of floats pass over NaN on a CPU."""
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
