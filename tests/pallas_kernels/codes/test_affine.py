from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import PlainCodes, WeightFormat, codes, pack, quantize
from tests.pallas_kernels.oracles import NUMPY_DTYPES, parameter_words

ALL_WORDS = np.arange(2**16, dtype=np.uint16).reshape(64, 1024)
# Scales and minima of many magnitudes, subnormals and zeros among them.
STEPS = np.float16([0.02, -1.7e-3, 3e-7, 0.0, 37.0, 0.5])
MINIMA = np.float16([-0.16, 0.9, 6e-8, -0.3, 0.0, -(2.0**10)])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("operand", ["bfloat16", "float16"])
def test_all_words_decode_with_one_rounding(decode, bits, operand):
    """Of the parameters to the operand's dtype, and of their multiply-add."""
    words, dtype = np.tile(ALL_WORDS, (len(STEPS), 1)), NUMPY_DTYPES[operand]
    steps, minima = (np.repeat(x, len(ALL_WORDS)) for x in (STEPS, MINIMA))
    planes = decode(
        words,
        parameter_words(steps, minima),
        format=f"affine{bits}:g32",
        operand=operand,
    )
    assert len(planes) == 16 // bits
    steps, minima = (x.astype(dtype).astype(np.float64)[:, None] for x in (steps, minima))
    for plane, found in enumerate(planes):
        plane_codes = (words >> (plane * bits) & (2**bits - 1)).astype(np.float64)
        expected = (plane_codes * steps + minima).astype(np.float32).astype(dtype)
        found = found.astype(np.float64)
        unit = 1.0 if np.abs(found).max() > 1 else 2.0**-64  # as inline PTX scales it
        np.testing.assert_array_equal(found / unit, expected.astype(np.float64))


def test_parameters_are_a_scale_and_a_minimum():
    kind = codes.of(WeightFormat.parse("affine4:g32"))
    words = jnp.asarray(parameter_words(STEPS, MINIMA))
    group = kind.load(words, "float16", jnp.dtype("float16"), 32)
    assert group.scale is None
    for found, expected in zip(group.arguments, (STEPS, MINIMA), strict=True):
        np.testing.assert_array_equal(np.asarray(found)[:, 0], expected)
    for found, expected in zip(
        kind.unpack_parameters(words, "float16"), (STEPS, MINIMA), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


def test_equal_weights_stay_exact():
    """Such a group's integer zero point would be infinite, or its weights be moved to zero."""
    weight = np.full((32, 2), 0.3330078125, np.float32)
    weight[:, 1] = -7.5
    np.testing.assert_array_equal(quantize(weight, "affine4:g32").dequantize(), weight)


def test_minima_beyond_float16_are_refused():
    weight = np.linspace(-7e4, 0, 32, dtype=np.float32)[:, None]
    with pytest.raises(ValueError, match=r"7e\+04, too large for affine8:g32, whose range is that"):
        quantize(weight, "affine8:g32")


def test_minima_are_floats():
    ones = np.ones((1, 1), np.float16)
    plain = PlainCodes(WeightFormat("affine4", 32), np.ones((32, 1), np.uint8), ones, ones)
    assert pack(plain).zeros().dtype == jnp.float16
    with pytest.raises(
        ValueError, match=r"zeros: the dtype is int32; expected float16, that of the"
    ):
        pack(PlainCodes(plain.format, plain.codes, ones, ones.astype(np.int32)))
