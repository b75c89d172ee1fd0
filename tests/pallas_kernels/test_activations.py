"""Activations that are rounded to 8 and 4 bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mpjax.kernels import ActivationBlocks, WeightFormat, quantize_activations
from tests.pallas_kernels.oracles import random_array

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
# Format, and the channels that share a scale; None for all.
FORMATS = {
    "int8/int8": None,
    "liquid4:g64/int8": None,  # groups are the weight's alone
    "float8:gK/float8": None,
    "float8:g128/float8": 128,
}
each_format = pytest.mark.parametrize("text", FORMATS)

quantized = jax.jit(quantize_activations, static_argnames=("format", "dtype"))


def oracle(x: np.ndarray, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Values [..., K] and scales [..., groups], one token and group at a time, in float32."""
    size = FORMATS[text] or x.shape[-1]
    values = np.empty(x.shape, np.int8 if text.endswith("int8") else E4M3)
    scales = np.empty((*x.shape[:-1], -(-x.shape[-1] // size)), np.float32)
    top = np.float32(127 if text.endswith("int8") else 448)
    for place in np.ndindex(scales.shape):
        channels = (*place[:-1], slice(place[-1] * size, (place[-1] + 1) * size))
        run = x[channels].astype(np.float32)
        peak = np.abs(run).max()
        peak = peak if peak > 1e-30 else top
        ratio = np.clip(run * (top / peak), -top, top)
        if top == 127:
            ratio = np.round(ratio)  # halves to even
        values[channels] = ratio.astype(values.dtype)
        scales[place] = peak * np.float32(1 / top)
    return values, scales


@each_format
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *(((384,), "float16"), ((5, 256), "bfloat16"), ((2, 3, 128), "float32")),
        *(((5, 200), "bfloat16"), ((2, 3, 64), "float32")),
    ],
)
def test_equals_the_oracle(text, dtype, shape, rng):
    x = random_array(rng, shape, dtype)
    found = quantized(x, WeightFormat.parse(text))
    values, scales = oracle(np.asarray(x), text)
    assert (found.values.dtype, found.scales.dtype) == (values.dtype, scales.dtype)
    np.testing.assert_array_equal(np.asarray(found.values).view(np.uint8), values.view(np.uint8))
    np.testing.assert_array_equal(found.scales, scales)
    assert found.shape == shape
    size = FORMATS[text] or shape[-1]
    expected = values.astype(np.float32) * np.repeat(scales, size, -1)[..., : shape[-1]]
    np.testing.assert_array_equal(found.dequantize(), expected)


@each_format
def test_zeros_stay_zero_with_a_scale_of_one(text, rng):
    x = rng.standard_normal((4, 256)).astype(np.float32)
    x[1], x[2, :128] = 0, 0
    found = quantized(x, WeightFormat.parse(text))
    assert (np.asarray(found.scales)[1] == 1).all()
    dequantized = np.asarray(found.dequantize())
    np.testing.assert_array_equal(dequantized[x == 0], 0)
    assert np.isfinite(dequantized).all()


@each_format
@pytest.mark.parametrize("peak", [1e-28, 1e-32, 1e-36, 1e-38])
def test_a_token_of_nearly_zeros_is_finite(text, peak):
    x = np.zeros((2, 256), np.float32)
    x[:, 3] = peak
    dequantized = np.asarray(quantized(x, WeightFormat.parse(text)).dequantize())
    np.testing.assert_allclose(dequantized, x, atol=1e-30)


@each_format
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_scales_tell_of_what_is_no_number(value, text):
    """In rows so wide that maxima of floats pass over NaN on a CPU."""
    x = np.ones((3, 4096), np.float32)
    x[1, 7] = value
    for function in (quantize_activations, quantized):
        scales = np.asarray(function(jnp.asarray(x), WeightFormat.parse(text)).scales)
        assert np.isnan(scales[1, 0])
        assert np.isfinite(scales[[0, 2]]).all()
        assert np.isfinite(scales[1, 1:]).all()  # of other groups


@pytest.mark.parametrize("text", ["uint4:g128", "float8:gK", "table3:g64", "bfloat16"])
def test_refuses_formats_with_sixteen_bit_activations(text):
    format = WeightFormat.parse(text)
    with pytest.raises(ValueError, match=f"{format} has 16-bit activations"):
        quantize_activations(jnp.ones((2, 128)), format)


def block_oracle(x: np.ndarray, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values [..., K] and scales [..., blocks], one token and block at a time, in float32."""
    values = np.empty(x.shape, np.int8)
    scales = np.empty((*x.shape[:-1], len(bits)), np.float32)
    for place in np.ndindex(scales.shape):
        channels = (*place[:-1], slice(place[-1] * 128, (place[-1] + 1) * 128))
        top = np.float32(2 ** (bits[place[-1]] - 1) - 1)
        peak = np.abs(x[channels]).max()
        peak = peak if peak > 1e-30 else top
        values[channels] = np.rint(x[channels] * (top / peak))
        scales[place] = peak * (np.float32(1) / top)
    return values, scales


@pytest.mark.parametrize("bits", [(4, 4, 4), (8, 4, 4), (4, 8, 4), (8, 8, 8)])
@pytest.mark.parametrize("channels", [384, 300])
def test_blocks_equal_the_oracle(channels, bits, rng):
    x = random_array(rng, (2, 3, channels), "bfloat16").at[1, 1].set(0)
    order = rng.permutation(channels).astype(np.int32)
    blocks = ActivationBlocks(jnp.asarray(bits, jnp.uint8), jnp.asarray(order))
    found = jax.jit(quantize_activations)(x, blocks)
    values, scales = block_oracle(np.asarray(x).astype(np.float32)[..., order], np.array(bits))
    np.testing.assert_array_equal(found.values, values)
    np.testing.assert_allclose(found.scales, scales, rtol=2e-7)
    assert found.is_permuted
    assert (found.dtype, found.values.dtype) == ("bfloat16", jnp.int8)


@pytest.mark.parametrize("text", ["float8:gK/float8", "float8:g128/float8"])
def test_the_rounding_stays_in_a_program_that_reads_the_values(text):
    """XLA removes a cast to FP8 and back on a GPU, so the rounding must be an operation itself."""
    format = WeightFormat.parse(text)
    lowered = jax.jit(lambda x: quantize_activations(x, format).dequantize()).lower(
        jax.ShapeDtypeStruct((2, 256), jnp.bfloat16)
    )
    assert "stablehlo.reduce_precision" in lowered.as_text()
