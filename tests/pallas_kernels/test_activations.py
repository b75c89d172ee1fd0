from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mpjax.kernels import WeightFormat
from mpjax.kernels.activations import QuantizedActivations, quantize_activations
from tests.pallas_kernels.oracles import random_array, wide

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


@pytest.mark.parametrize("text", ["float8:gK/float8", "float8:g128/float8"])
def test_the_rounding_stays_in_a_program_that_reads_the_values(text):
    """XLA removes a cast to FP8 and back on a GPU, so the rounding must be an operation itself."""
    format = WeightFormat.parse(text)
    lowered = jax.jit(lambda x: quantize_activations(x, format).dequantize()).lower(
        jax.ShapeDtypeStruct((2, 256), jnp.bfloat16)
    )
    assert "stablehlo.reduce_precision" in lowered.as_text()


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


@each_format
def test_there_may_be_no_tokens(text):
    found = quantized(jnp.zeros((2, 0, 256), jnp.bfloat16), WeightFormat.parse(text))
    groups = 256 // (FORMATS[text] or 256)
    assert (found.shape, found.scales.shape) == ((2, 0, 256), (2, 0, groups))
    assert found.dequantize().shape == (2, 0, 256)


@each_format
@pytest.mark.parametrize("shape", [(3, 0), ()])
def test_there_must_be_channels(shape, text):
    with pytest.raises(ValueError, match=r"x has shape .*; expected \[..., K\] with one channel"):
        quantize_activations(jnp.zeros(shape), text)


@each_format
def test_the_largest_magnitude_has_the_largest_value(text, rng):
    x = rng.standard_normal((3, 256)).astype(np.float32)
    peaks = rng.integers(0, 256, 3)
    x[np.arange(3), peaks] = [-50, 50, 9]
    values = wide(quantized(x, WeightFormat.parse(text)).values)
    top = 127 if text.endswith("int8") else 448
    np.testing.assert_array_equal(values[np.arange(3), peaks], [-top, top, top])
    assert np.abs(values).max() == top


@each_format
def test_round_trip_is_off_by_half_a_step(text, rng):
    x = rng.standard_normal((16, 512)).astype(np.float32) * 10
    x[:, 7] = 300  # an outlier
    found = quantized(x, WeightFormat.parse(text))
    error = np.abs(wide(found.dequantize()) - x)
    scales = np.repeat(wide(found.scales), 512 // found.scales.shape[-1], axis=-1)
    if text.endswith("int8"):
        step = scales
    else:  # three bits of mantissa, of a number no smaller than 2**-6
        exponent = np.maximum(np.floor(np.log2(np.abs(x) / scales)), -6)
        step = scales * np.exp2(exponent - 3)
    assert (error <= step / 2 * (1 + 1e-4)).all()
    assert (error > step * 0.4).mean() > 0.1


def test_groups_keep_an_outlier_to_themselves(rng):
    x = rng.standard_normal((4, 256)).astype(np.float32)
    x[:, 0] = 1e4
    scales = np.asarray(quantized(x, WeightFormat.parse("float8:g128/float8")).scales)
    np.testing.assert_allclose(scales[:, 0], 1e4 / 448, rtol=1e-6)
    assert (scales[:, 1] < 0.02).all()


def test_dequantize_computes_in_float32_and_rounds_once(rng):
    values = rng.integers(-127, 128, (3, 256)).astype(np.int8)
    scales = rng.uniform(0.1, 2, (3, 2)).astype(np.float32)
    activations = QuantizedActivations(jnp.asarray(values), jnp.asarray(scales), "bfloat16")
    expected = values.astype(np.float32) * np.repeat(scales, 128, axis=1)
    np.testing.assert_array_equal(activations.dequantize(), expected)
    for dtype in ("bfloat16", "float16"):
        found = activations.dequantize(dtype)
        np.testing.assert_array_equal(np.asarray(found), expected.astype(found.dtype))


def test_activations_are_a_pytree(rng):
    x = random_array(rng, (2, 128), "bfloat16")
    found = quantized(x, WeightFormat.parse("int8"))
    leaves, structure = jax.tree.flatten(found)
    assert [leaf.dtype for leaf in leaves] == [jnp.int8, jnp.float32]
    again = jax.tree.unflatten(structure, leaves)
    assert (again.shape, again.dtype) == ((2, 128), "bfloat16")


def test_activations_remember_the_dtype_of_products(rng):
    x, format = random_array(rng, (2, 128), "float16"), WeightFormat.parse("int8")
    assert quantized(x, format).dtype == "float16"
    assert quantized(x, format, dtype="bfloat16").dtype == "bfloat16"
    assert quantized(x, format, dtype=jnp.dtype(jnp.float32)).dtype == "float32"


@pytest.mark.parametrize("text", ["uint4:g128", "float8:gK", "table3:g64", "bfloat16"])
def test_refuses_formats_with_sixteen_bit_activations(text):
    format = WeightFormat.parse(text)
    with pytest.raises(ValueError, match=f"{format} has 16-bit activations"):
        quantize_activations(jnp.ones((2, 128)), format)


@each_format
def test_the_format_may_be_text(text, rng):
    x = random_array(rng, (2, 128), "float16")
    expected = quantized(x, WeightFormat.parse(text))
    jax.tree.map(np.testing.assert_array_equal, quantized(x, text), expected)
