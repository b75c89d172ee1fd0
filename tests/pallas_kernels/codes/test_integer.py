from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import WeightFormat, codes
from mpjax.kernels.bits import plane_exponent
from tests.pallas_kernels.oracles import NUMPY_DTYPES, parameter_words
from tests.sweeps import combinations

# All words once for every zero point, a row of 1024 words having one.
ALL_WORDS = np.arange(2**16, dtype=np.uint16).reshape(64, 1024)

each_bits = pytest.mark.parametrize("bits", [4, 8])
each_operand = pytest.mark.parametrize("operand", ["bfloat16", "float16"])


def zero_points(bits: int) -> list[int]:
    every_four = list(range(2**bits + 1))
    return every_four if bits == 4 else [0, 1, 2, 127, 128, 129, 200, 254, 255, 256]


@each_bits
@each_operand
def test_all_words_decode_to_code_minus_zero(decode, bits, operand):
    zeros = np.repeat(zero_points(bits), len(ALL_WORDS)).astype(np.uint16)
    words = np.tile(ALL_WORDS, (len(zero_points(bits)), 1))
    parameters = parameter_words(np.full(len(zeros), 0.7, np.float16), zeros)
    planes = decode(words, parameters, format=f"uint{bits}:g32", operand=operand)
    assert planes.dtype == NUMPY_DTYPES[operand]
    assert len(planes) == 16 // bits
    for plane, values in enumerate(planes):
        plane_codes = (words >> (plane * bits) & (2**bits - 1)).astype(np.float32)
        unit = 2.0 ** plane_exponent(operand)
        expected = (plane_codes - zeros[:, None]) * unit
        np.testing.assert_array_equal(values.astype(np.float32), expected)


@combinations(
    1,
    bits=[4, 8],
    dtypes=[("bfloat16", "bfloat16"), ("bfloat16", "float16"), ("float16", "float16")],
    suffix=["", ":sym"],
)
def test_all_words_decode_to_scaled_weights(decode, bits, dtypes, suffix):
    """Scales of many magnitudes and both signs, in the operand's dtype; one rounding."""
    operand, scale_dtype = dtypes
    scales = np.float32([2e-2, 1.7e-3, -0.9, 37.0]).astype(NUMPY_DTYPES[scale_dtype])
    zeros = np.repeat([2 ** (bits - 1)] * len(scales), len(ALL_WORDS)).astype(np.uint16)
    words, scales = np.tile(ALL_WORDS, (len(scales), 1)), np.repeat(scales, len(ALL_WORDS))
    planes = decode(
        words,
        parameter_words(scales, zeros),
        format=f"uint{bits}:g32{suffix}",
        operand=operand,
        scale_dtype=scale_dtype,
        scaled=True,
    )
    for plane, values in enumerate(planes):
        plane_codes = (words >> (plane * bits) & (2**bits - 1)).astype(np.float32)
        step = scales[:, None].astype(NUMPY_DTYPES[operand]).astype(np.float32)
        exact = (plane_codes - zeros[:, None]) * step
        expected = exact.astype(NUMPY_DTYPES[operand]).astype(np.float32)
        np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float16"])
@each_operand
def test_parameters_are_a_scale_and_a_zero_point(scale_dtype, operand):
    scales = np.array([0.5, -3e-3, 6e-8, 1e4], NUMPY_DTYPES[scale_dtype])
    zeros = np.array([0, 7, 128, 256], np.uint16)
    group = codes.of(WeightFormat.parse("uint8:g32")).load(
        jnp.asarray(parameter_words(scales, zeros)), scale_dtype, jnp.dtype(operand), 64
    )
    assert group.scale is not None
    assert group.scale.dtype == jnp.float32
    unit = 2.0 ** plane_exponent(operand)  # of what it multiplies
    np.testing.assert_array_equal(group.scale * unit, scales.astype(np.float32)[:, None])
    [zero] = group.arguments
    assert zero.dtype == jnp.dtype(operand)
    np.testing.assert_array_equal(np.asarray(zero).astype(int), zeros[:, None])
