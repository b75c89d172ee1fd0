from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpjax.kernels.kv_cache import quantize
from tests.pallas_kernels.kv_cache.pages import vectors
from tests.pallas_kernels.oracles import kv_encoded

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


@each_dtype
def test_a_range_of_zero_decodes_to_its_value(dtype):
    x = jnp.full((1, 64), 2.5, dtype)
    codes, scale, zero = encode(x, 4)
    np.testing.assert_array_equal(codes, 0)
    assert (float(scale[0]), float(zero[0])) == (2.0**-14, 2.5)


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


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_what_is_beyond_float16_is_its_end(bits):
    low, high = jnp.float32([-1e9, 7e4, -3e38]), jnp.float32([1e6, 8e4, 2.0])
    scale, zero = quantize.parameters(low, high, bits, jnp.float16)
    np.testing.assert_array_equal(zero, [-65504, 65504, -65504])
    assert np.isfinite(np.asarray(scale)).all()
    codes = quantize.encode(jnp.stack([low, high], 1), scale[:, None], zero[:, None], bits)
    top = 2**bits - 1
    np.testing.assert_array_equal(codes[:2], [[0, top], [top, top]])


def test_parameters_stand_beside_values_of_any_dtype():
    found = [quantize.parameter_dtype(dtype).name for dtype in ("bfloat16", "float16", "float32")]
    assert found == ["bfloat16", "float16", "float16"]
