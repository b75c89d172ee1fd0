"""Codes that are integers."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from mpjax.kernels import PlainCodes, WeightFormat, quantize
from mpjax.kernels.bits import plane_exponent
from mpjax.kernels.grid import fit
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


def test_minima_beyond_float16_are_refused():
    weight = np.linspace(-7e4, 0, 32, dtype=np.float32)[:, None]
    with pytest.raises(ValueError, match=r"7e\+04, too large for affine8:g32, whose range is that"):
        quantize(weight, "affine8:g32")


ALL_BYTES = np.arange(256, dtype=np.uint8)


def test_all_bytes_decode_to_sixteen_times_their_codes(decode):
    words = np.tile(ALL_BYTES, (16, 1))
    planes = decode(
        words,
        np.zeros(16, np.uint32),
        format="int4:g128",
        operand="int8",
        scale_dtype="float32",
    )
    assert planes.dtype == np.int8
    for plane, values in enumerate(planes):
        nibbles = (ALL_BYTES >> (4 * plane) & 15).astype(np.int64)
        codes = np.where(nibbles < 8, nibbles, nibbles - 16)
        np.testing.assert_array_equal(values, np.broadcast_to(16 * codes, values.shape))


LIQUID4 = WeightFormat.parse("liquid4:g64")

# Every step and offset with which no code exceeds a byte.
PAIRS = [(step, offset) for step in range(18) for offset in range(256 - 15 * step)]


def test_all_bytes_decode_with_all_steps_and_offsets(decode):
    pairs = np.array(PAIRS[: len(PAIRS) // 16 * 16], np.uint32)
    assert len(PAIRS) - len(pairs) < 16
    groups = pairs, np.roll(pairs, 1000, 0)  # of a plane each
    low, high = (steps | offsets << 8 for steps, offsets in (pairs.T for pairs in groups))
    words = np.tile(ALL_BYTES, (len(pairs), 1))
    planes = decode(
        words, low | high << 16, format="liquid4:g64", operand="int8", scale_dtype="uint16"
    )
    assert planes.dtype == np.int8
    for plane, values in enumerate(planes):
        nibbles = (ALL_BYTES >> (4 * plane) & 15).astype(np.int64)
        steps, offsets = groups[plane].astype(np.int64).T[:, :, None]
        expected = nibbles * steps + offsets - 128
        np.testing.assert_array_equal(values, expected)


def every_range() -> tuple[np.ndarray, np.ndarray]:
    """int16 [320, 28680]: each (min, max) in −119 … 119, all values between in 4 groups of 64."""
    low, high = (index - 119 for index in np.triu_indices(239))
    rest = np.arange(4)[:, None] * 62 + np.arange(62)  # [groups, rows]
    between = np.minimum(low + rest[:, :, None], high)
    ends = np.broadcast_to(np.stack([low, high]), (4, 2, len(low)))
    groups = np.concatenate([ends, between], 1).reshape(256, -1)
    # A last group gives each channel the largest magnitude 119, so that its scale is 1.
    return np.concatenate([groups, np.full((64, len(low)), 119)]).astype(np.int16), high - low


def test_no_range_overflows_a_byte_or_errs_by_more_than_eight():
    values, width = every_range()
    assert values.shape == (320, 28680)
    found = jax.jit(lambda weight: fit(weight, LIQUID4).round(weight))(values.astype(np.float32))
    nibbles, steps, offsets, scales = as_integers(found)
    np.testing.assert_allclose(scales, 1, rtol=1e-6)

    # The formulas of the second level, halves rounded up.
    groups = values.reshape(5, 64, -1)
    low = groups.min(1)
    expected_steps = np.maximum(1, np.floor((groups.max(1) - low) / 15 + 0.5))
    np.testing.assert_array_equal(steps, expected_steps)
    np.testing.assert_array_equal(offsets, low + 128)
    shifted = groups - low[:, None]
    expected = np.minimum(15, np.floor(shifted / expected_steps[:, None] + 0.5))
    np.testing.assert_array_equal(nibbles.reshape(groups.shape), expected)

    # A lane never carries into the next, neither in the product nor in the sum.
    sums = nibbles.reshape(groups.shape) * steps[:, None] + offsets[:, None]
    assert sums.max() <= 255
    assert steps.max() == 16
    # Where a step is not the least one, not even a code that doesn't occur would.
    assert (15 * steps + offsets)[groups.max(1) - low > 7].max() <= 255
    error = np.abs(sums - 128 - groups)
    assert error.max() == 8
    # Without the clamp to 15, this many ranges would take a 16th code.
    clamped = np.floor(width / expected_steps[0] + 0.5) > 15
    assert clamped.sum() == 8484


def as_integers(found: PlainCodes) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    assert found.zeros is not None
    assert found.channel_scales is not None
    codes, steps, offsets = (
        np.asarray(array).astype(np.int16) for array in (found.codes, found.scales, found.zeros)
    )
    return codes, steps, offsets, np.asarray(found.channel_scales)


INT8 = WeightFormat.parse("int8/int8")


def test_words_are_the_operand(decode):
    words = np.tile(np.arange(-128, 128, dtype=np.int8), (16, 1))
    scales = np.linspace(0.1, 1, 16, dtype=np.float32)
    planes = decode(
        words, scales.view(np.uint32), format="int8/int8", operand="int8", scale_dtype="float32"
    )
    np.testing.assert_array_equal(planes, words[None])
