from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.kv_cache import quantize
from tests.pallas_kernels.kv_cache.pages import vectors
from tests.pallas_kernels.oracles import NUMPY_DTYPES, kv_encoded

each_bits = pytest.mark.parametrize("bits", [4, 8])
each_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


def encode(x: jax.Array, bits: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    dtype = quantize.parameter_dtype(x.dtype)
    values = x.astype(jnp.float32)
    scale, zero = quantize.parameters(values.min(-1), values.max(-1), bits, dtype)
    return quantize.encode(values, scale[..., None], zero[..., None], bits), scale, zero


@each_bits
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("transform", [jax.jit, lambda function, **_: function])
def test_equals_the_oracle(bits, dtype, transform, rng):
    x = vectors(rng, (2000, 64), dtype)
    actual = transform(encode, static_argnums=1)(jnp.asarray(x), bits)
    for one, other in zip(actual, kv_encoded(x, bits), strict=True):
        np.testing.assert_array_equal(np.asarray(one), other.astype(np.float32))


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
    assert_divided(quantize.divide(jnp.full(scales.shape, 2.0), jnp.asarray(scales)), scales)


@pytest.mark.gpu
@each_scale_dtype
def test_division_on_the_gpu(dtype):
    scales = all_scales(dtype)
    divide = jax.jit(quantize.divide)
    assert_divided(divide(jnp.full(scales.shape, 2.0), jnp.asarray(scales)), scales)


def test_division_by_next_to_nothing_is_infinite():
    assert quantize.divide(jnp.array(2.0), jnp.array(2.0**-127)) == np.inf


@each_dtype
def test_a_range_of_zero_decodes_to_its_value(dtype):
    x = jnp.full((1, 64), 2.5, dtype)
    codes, scale, zero = encode(x, 4)
    np.testing.assert_array_equal(codes, 0)
    assert (float(scale[0]), float(zero[0])) == (1, 2.5)


@settings(max_examples=20)
@given(
    bits=st.sampled_from([4, 8]),
    dtype=st.sampled_from(["bfloat16", "float16"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_an_element_is_off_by_half_a_step_and_what_the_ends_of_the_range_moved(bits, dtype, seed):
    x = vectors(np.random.default_rng(seed), (200, 64), dtype).astype(np.float64)
    codes, scale, zero = (
        np.asarray(part, np.float64) for part in encode(jnp.asarray(x, dtype), bits)
    )
    decoded = codes * scale[:, None] + zero[:, None]
    top = 2**bits - 1
    low, high = x.min(1), x.max(1)
    # Rounding the zero up, or the scale down, leaves the ends of the range uncovered.
    uncovered = np.maximum(np.maximum(zero - low, high - (zero + top * scale)), 0)
    error = np.abs(decoded - x).max(1)
    assert (error <= (np.maximum(scale / 2, uncovered)) * (1 + 1e-5)).all()
    assert ((codes >= 0) & (codes <= top)).all()


@each_dtype
def test_scales_and_zeros_have_the_precision_they_are_stored_in(dtype, rng):
    x = vectors(rng, (500, 64), dtype)
    _, scale, zero = encode(jnp.asarray(x), 8)
    for part in (scale, zero):
        assert part.dtype == jnp.float32
        stored = np.asarray(part.astype(dtype).astype(jnp.float32))
        np.testing.assert_array_equal(stored, np.asarray(part))


def test_parameters_stand_beside_values_of_any_dtype():
    found = [quantize.parameter_dtype(dtype).name for dtype in ("bfloat16", "float16", "float32")]
    assert found == ["bfloat16", "float16", "float16"]
