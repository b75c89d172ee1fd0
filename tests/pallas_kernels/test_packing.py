"""Plain codes, their checks, and packed shapes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mpjax.kernels import PlainCodes, WeightFormat, pack
from tests.pallas_kernels.oracles import PACKED_FORMATS, PlainWeight

FORMAT = WeightFormat.parse("uint4:g32")
UINT4 = {
    "codes": np.zeros((64, 4), np.uint8),
    "scales": np.ones((2, 4), np.float16),
    "zeros": np.zeros((2, 4), np.uint8),
    "format": FORMAT,
}
TABLE2 = {
    "codes": np.zeros((64, 4), np.uint8),
    "scales": np.ones((2, 4), np.float16),
    "zeros": None,
    "format": WeightFormat.parse("table2:g32"),
    "table": np.zeros(4, np.float32),
}
LIQUID4 = {
    "codes": np.zeros((64, 4), np.uint8),
    "scales": np.ones((1, 4), np.uint16),
    "zeros": np.ones((1, 4), np.uint16),
    "format": WeightFormat.parse("liquid4:g64"),
    "channel_scales": np.ones(4, np.float32),
}
INT8 = {
    "codes": np.zeros((64, 4), np.int8),
    "scales": np.ones((1, 4), np.float32),
    "zeros": None,
    "format": WeightFormat.parse("int8"),
}
FLOAT8 = INT8 | {
    "codes": np.zeros((64, 4), ml_dtypes.float8_e4m3fn),
    "format": WeightFormat.parse("float8"),
}


def test_stacks_are_checked_as_matrices():
    stacked = {
        name: np.stack([value, value]) if isinstance(value, np.ndarray) else value
        for name, value in (LIQUID4 | {"permutation": np.arange(64)}).items()
    }
    assert pack(PlainCodes(**stacked)).shape == (2, 64, 4)
    lacking = stacked["permutation"].copy()  # type: ignore[attr-defined]
    lacking[1, 5] = 6
    large = stacked["codes"].copy()  # type: ignore[attr-defined]
    large[1, 3, 2] = 15
    for change, message in (
        ({"permutation": lacking}, "permutation lacks 1 of 64 channels, such as 5"),
        ({"permutation": lacking[0]}, r"permutation: the shape is \(64,\), .* expects \(2, 64\)"),
        ({"channel_scales": np.ones(4, np.float32)}, r"is \(4,\), and .* expects \(2, 4\)"),
        ({"codes": large, "scales": stacked["scales"] * 20}, r"offset is up to 301"),
    ):
        with pytest.raises(ValueError, match=message):
            pack(PlainCodes(**(stacked | change)))


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (UINT4, {"format": WeightFormat.parse("bfloat16")}, "bfloat16 is not packed"),
        (UINT4, {"codes": np.zeros(64, np.uint8)}, r"shape is \(64,\); uint4:g32 is the format"),
        (UINT4, {"codes": np.zeros((64, 4), np.int8)}, "dtype int8; expected unsigned integers"),
        (UINT4, {"codes": np.zeros((64, 4), np.float32)}, "dtype float32; expected unsigned"),
        (INT8, {"codes": np.zeros((64, 4), np.uint8)}, "dtype uint8; expected int8"),
        (FLOAT8, {"codes": np.zeros((64, 4), np.uint8)}, "dtype uint8; expected float8_e4m3fn"),
        (UINT4, {"codes": np.zeros((48, 4), np.uint8)}, "48 input channels can't be split into"),
        (UINT4, {"codes": np.full((64, 4), 17, np.uint8)}, "codes are 17 to 17; expected 0 to 15"),
        (UINT4, {"zeros": np.full((2, 4), 17, np.uint8)}, "zeros are 17 to 17; expected 0 to 16"),
        (UINT4, {"zeros": np.full((2, 4), -1, np.int32)}, "zeros are -1 to -1; expected 0 to 16"),
        (UINT4, {"scales": np.ones((1, 4), np.float16)}, r"scales.*\(1, 4\).*expects \(2, 4\)"),
        (UINT4, {"format": WeightFormat("uint4", 32, True)}, r"zeros.*\(2, 4\).*expects None"),
        (UINT4, {"zeros": np.ones((2, 5), np.uint8)}, r"zeros.*\(2, 5\).*expects \(2, 4\)"),
        (UINT4, {"zeros": None}, r"zeros.*None.*expects \(2, 4\)"),
        (TABLE2, {"zeros": np.ones((2, 4), np.uint8)}, r"zeros.*\(2, 4\).*expects None"),
        (UINT4, {"permutation": np.arange(32, dtype=np.int32)}, r"permutation.*\(32,\).*\(64,\)"),
        (
            UINT4,
            {"zeros": np.full((2, 4), 300.0)},
            "zeros: the dtype is float32; expected integers",
        ),
        (UINT4, {"zeros": np.full((2, 4), -3.5, np.float16)}, "zeros: the dtype is float16"),
        (
            UINT4,
            {"permutation": np.arange(64.0)},
            "permutation: the dtype is float32; expected int",
        ),
        (
            UINT4,
            {"permutation": np.zeros(64, np.int32)},
            "lacks 63 of 64 channels, such as 1; .* 63",
        ),
        (UINT4, {"permutation": np.arange(64) - 1}, "lacks 1 of 64 channels, such as 63"),
        (UINT4, {"permutation": np.arange(64) + 1}, "lacks 1 of 64 channels, such as 0"),
        (UINT4, {"channel_scales": np.ones(4, np.float32)}, r"channel_scales.*\(4,\).*None"),
        (
            LIQUID4,
            {"scales": np.full((1, 4), 256, np.uint16)},
            "scales are 256 to 256; .* 0 to 255",
        ),
        (LIQUID4, {"zeros": np.full((1, 4), 300, np.uint16)}, "zeros are 300 to 300; .* 0 to 255"),
        (LIQUID4, {"channel_scales": None}, r"channel_scales.*None.*expects \(4,\)"),
        (LIQUID4, {"channel_scales": np.ones(1, np.float32)}, r"channel_scales.*\(1,\).*\(4,\)"),
        (UINT4, {"table": np.ones(16, np.float32)}, r"table.*\(16,\).*expects None"),
        (TABLE2, {"table": None}, r"table.*None.*expects \(4,\)"),
        (TABLE2, {"table": np.ones(8, np.float32)}, r"table.*\(8,\).*expects \(4,\)"),
        (UINT4, {"scales": np.ones((2, 4), np.float32)}, "float32; expected float16 or bfloat16"),
        (INT8, {"scales": np.ones((1, 4), np.float16)}, "dtype float16; expected float32"),
        (FLOAT8, {"scales": np.ones((1, 4), np.float16)}, "dtype float16; expected float32"),
        (LIQUID4, {"scales": np.ones((1, 4), np.float16)}, "dtype float16; expected uint16"),
    ],
)
def test_pack_refuses(base, change, message):
    assert jax.eval_shape(lambda: pack(PlainCodes(**base))).shape == (64, 4)
    with pytest.raises(ValueError, match=message):
        pack(PlainCodes(**(base | change)))


def test_codes_of_liquid4_stay_within_a_byte():
    codes = np.repeat(np.array([15, 1], np.uint8), 64)[:, None].repeat(4, 1)
    steps, offsets = (np.full((4, 2), pair, np.uint16).T for pair in ([16, 255], [15, 0]))
    arguments = LIQUID4 | {"codes": codes, "scales": steps, "zeros": offsets}
    np.testing.assert_array_equal(pack(PlainCodes(**arguments)).dequantize(), 127)
    codes[70, 2] = 2
    with pytest.raises(ValueError, match=r"code · step \+ offset is up to 510; .* 255, a byte"):
        pack(PlainCodes(**arguments))


def test_pack_looks_at_what_is_known_under_jit():
    arrays = {name: jnp.asarray(UINT4[name]) for name in ("codes", "scales", "zeros")}
    arguments = UINT4 | arrays | {"permutation": jnp.arange(64)}
    assert jax.jit(lambda: pack(PlainCodes(**arguments)))().shape == (64, 4)
    arguments["zeros"] += jnp.uint8(17)
    with pytest.raises(ValueError, match="zeros are 17 to 17"):
        jax.jit(lambda: pack(PlainCodes(**arguments)))()


FORMATS = [text for text in PACKED_FORMATS if ":g32" not in text and ":g64:" not in text]


@pytest.mark.parametrize("text", FORMATS)
def test_dequantize_equals_the_description_of_the_format(text, rng):
    plain = PlainWeight.random(rng, WeightFormat.parse(text), 256, 4)
    order = rng.permutation(256)
    found = jax.jit(lambda plain: plain.dequantize())(plain.plain(order))
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(found, np.float64)[order], plain.values())


@pytest.mark.parametrize("scale_dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_scales_of_checkpoints_may_be_wider_than_packed_ones(scale_dtype):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (64, 4), dtype=np.uint8)
    zeros = rng.integers(0, 257, (2, 4), dtype=np.uint16)
    scales = rng.uniform(0.1, 1, (2, 4)).astype(scale_dtype)
    permutation = rng.permutation(64).astype(np.int32)
    arrays = (jnp.asarray(array) for array in (codes, scales, zeros, permutation))
    plain = PlainCodes("uint8:g32", *arrays)
    expected = np.empty((64, 4), np.float32)
    for row, channel in enumerate(permutation):
        difference = codes[row].astype(np.float32) - zeros[row // 32].astype(np.float32)
        expected[channel] = difference * scales[row // 32].astype(np.float32)
    np.testing.assert_array_equal(plain.dequantize(), expected)
    rounded = plain.dequantize("bf16")
    np.testing.assert_array_equal(rounded, expected.astype(ml_dtypes.bfloat16))
