from __future__ import annotations

import jax
import numpy as np

from mpjax.kernels import PlainCodes, WeightFormat
from mpjax.kernels.grid import fit

FORMAT = WeightFormat.parse("liquid4:g64")
ALL_BYTES = np.arange(256, dtype=np.uint8)

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
    found = jax.jit(lambda weight: fit(weight, FORMAT).round(weight))(values.astype(np.float32))
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
