from __future__ import annotations

import numpy as np

from mpjax.kernels import WeightFormat
from mpjax.kernels.grid import fit

FORMAT = WeightFormat.parse("int4:g128")
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


def test_a_range_is_fifteen_steps(rng):
    weight = rng.standard_normal((200, 3)).astype(np.float32)
    weight[:, 2] = 0
    plain = fit(weight, FORMAT).round(weight)
    codes, scales = np.asarray(plain.codes), np.asarray(plain.scales)
    assert (codes.dtype, scales.shape) == (np.int8, (2, 3))
    for group in (slice(0, 128), slice(128, 200)):
        peak = np.abs(weight[group]).max(0)
        expected = np.where(peak == 0, 1, peak * 2 / 15)
        np.testing.assert_allclose(scales[group.start // 128], expected, rtol=1e-6)
        error = np.abs(codes[group] * scales[group.start // 128] - weight[group])
        assert (error <= expected / 2 * 1.0001).all()
    assert codes.min() == -8 or codes.max() == 7
