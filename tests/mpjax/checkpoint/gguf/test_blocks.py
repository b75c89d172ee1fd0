"""The numbers of blocks, bit for bit: against loops from ggml's description, and its package."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest

from mpjax.checkpoint.gguf.blocks import BLOCK_TYPES, TYPES, of_number
from mpjax.errors import CheckpointError
from tests.mpjax.checkpoint.gguf import write_gguf

f32 = np.float32


def half(block: np.ndarray, place: int) -> np.float32:
    return f32(block[place : place + 2].view(np.float16)[0])


def nibble(packed: np.ndarray, i: int) -> int:
    """The code i of a block of 32, whose first half is in the low nibbles."""
    return int(packed[i] & 15 if i < 16 else packed[i - 16] >> 4)


def fifth(packed: np.ndarray, i: int) -> int:
    return int(packed.view(np.uint32)[0]) >> i & 1


def six_bits(packed: np.ndarray, j: int) -> tuple[int, int]:
    """The scale and the minimum of a run of 32 codes, as ggml's get_scale_min_k4 reads them."""
    b = [int(byte) for byte in packed]
    if j < 4:
        return b[j] & 63, b[j + 4] & 63
    return b[j + 4] & 15 | b[j - 4] >> 6 << 4, b[j + 4] >> 4 | b[j] >> 6 << 4


def k_code(packed: np.ndarray, i: int) -> int:
    byte = packed[i // 64 * 32 + i % 32]
    return int(byte >> 4 if i // 32 % 2 else byte & 15)


def with_minimum(block: np.ndarray, i: int, code: int) -> np.float32:
    scale, minimum = six_bits(block[4:16], i // 32)
    return half(block, 0) * f32(scale) * f32(code) - half(block, 2) * f32(minimum)


def q6_k(block: np.ndarray, i: int) -> np.float32:
    part, inner = divmod(i, 128)
    run, lane = divmod(inner, 32)
    low = block[64 * part + 32 * (run % 2) + lane]
    low = low >> 4 if run >= 2 else low & 15
    high = block[128 + 32 * part + lane] >> 2 * run & 3
    scale = block[192 + i // 16 : 193 + i // 16].view(np.int8)[0]
    return half(block, 208) * f32(scale) * f32(int(low | high << 4) - 32)


def q2_k(block: np.ndarray, i: int) -> np.float32:
    byte = block[16 + i // 128 * 32 + i % 32]
    both = int(block[i // 16])
    step = half(block, 80) * f32(both & 15)
    return step * f32(byte >> i // 32 % 4 * 2 & 3) - half(block, 82) * f32(both >> 4)


def q3_k(block: np.ndarray, i: int) -> np.float32:
    low = int(block[32 + i // 128 * 32 + i % 32]) >> i // 32 % 4 * 2 & 3
    code = low - (0 if block[i % 32] >> i // 32 & 1 else 4)
    j = i // 16
    scale = (
        int(block[96 + j % 8]) >> j // 8 * 4 & 15 | (int(block[104 + j % 4]) >> j // 4 * 2 & 3) << 4
    )
    return half(block, 108) * f32(scale - 32) * f32(code)


LEVELS = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]


def iq4_xs(block: np.ndarray, i: int) -> np.float32:
    run, lane = divmod(i, 32)
    high = int(block[2:4].view(np.uint16)[0]) >> 2 * run & 3
    scale = (int(block[4 + run // 2]) >> run % 2 * 4 & 15) + 16 * high - 32
    packed = block[8 + 16 * run : 24 + 16 * run]
    return half(block, 0) * f32(scale) * f32(LEVELS[nibble(packed, lane)])


EXPECTED = {
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "IQ4_NL": lambda b, i: half(b, 0) * f32(LEVELS[nibble(b[2:], i)]),
    "IQ4_XS": iq4_xs,
    "Q8_0": lambda b, i: half(b, 0) * f32(b[2 + i : 3 + i].view(np.int8)[0]),
    "Q4_0": lambda b, i: half(b, 0) * f32(nibble(b[2:], i) - 8),
    "Q4_1": lambda b, i: half(b, 0) * f32(nibble(b[4:], i)) + half(b, 2),
    "Q5_0": lambda b, i: half(b, 0) * f32((nibble(b[6:], i) | fifth(b[2:6], i) << 4) - 16),
    "Q5_1": lambda b, i: half(b, 0) * f32(nibble(b[8:], i) | fifth(b[4:8], i) << 4) + half(b, 2),
    "Q4_K": lambda b, i: with_minimum(b, i, k_code(b[16:], i)),
    "Q5_K": lambda b, i: with_minimum(
        b, i, k_code(b[48:], i) | (int(b[16 + i % 32]) >> i // 32 & 1) << 4
    ),
    "Q6_K": q6_k,
}
# Float16 scales at the ends of its range, subnormal ones among them.
EXTREME = np.array([2**-24, -(2**-24), 2**-14, 65504, -65504, 0], np.float16)


def blocks(kind: str, rng: np.random.Generator) -> np.ndarray:
    """uint8 [2, blocks, bytes]: random bytes with ordinary and with extreme scales."""
    _, size, nbytes = write_gguf.TYPES[kind]
    found = np.frombuffer(write_gguf.random_blocks(kind, (20 * size,), rng), np.uint8)
    found = found.reshape(20, nbytes).copy()
    if kind == "MXFP4":  # whose exponents are a byte; those of NaN and infinities are left out
        found[:, 0] = rng.integers(2, 250, 20)
    if kind == "IQ1_M":  # whose scale is spread over the steps: not NaN or an infinity
        found[:, 55] &= 0xBF
    for place in write_gguf.SCALES.get(kind, [0]):
        scales = np.roll(EXTREME, place)
        found[: len(scales), place : place + 2] = scales[:, None].view(np.uint8)
    return found.reshape(2, 10, nbytes)


@pytest.mark.parametrize("kind", EXPECTED)
def test_every_number_of_every_block(kind, rng):
    given = blocks(kind, rng)
    found = np.asarray(jax.jit(BLOCK_TYPES[kind].dequantize)(given))
    size = write_gguf.TYPES[kind][1]
    expected = [[EXPECTED[kind](b, i) for b in row for i in range(size)] for row in given]
    np.testing.assert_array_equal(found.view(np.uint32), np.array(expected, f32).view(np.uint32))


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_the_package_of_the_format_agrees(kind, rng):
    gguf = pytest.importorskip("gguf")
    given = blocks(kind, rng)
    found = np.asarray(jax.jit(BLOCK_TYPES[kind].dequantize)(given))
    expected = gguf.dequantize(given.reshape(2, -1), gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("kind", [kind for kind in BLOCK_TYPES.values() if kind.codes])
def test_codes_and_scales_make_the_numbers(kind, rng):
    given = blocks(kind.name, rng)
    codes, scales, minima = kind.codes(given)
    assert (minima is not None) == kind.has_minima
    codes = np.asarray(codes)
    is_unsigned = kind.has_minima or kind.table is not None
    assert codes.min() >= (0 if is_unsigned else -(2 ** (kind.code_bits - 1)))
    assert codes.max() < 2 ** (kind.code_bits - (not is_unsigned))
    numbers = codes.astype(f32) if kind.table is None else f32(kind.table)[codes]
    numbers = numbers * np.asarray(scales)
    numbers = numbers if minima is None else numbers + np.asarray(minima)
    np.testing.assert_array_equal(numbers.reshape(2, -1), kind.dequantize(given))


def test_types_have_the_numbers_of_the_format():
    for kind in TYPES.values():
        assert (kind.number, kind.size, kind.block_bytes) == write_gguf.TYPES[kind.name]
    assert [TYPES[n].dtype for n in (0, 1, 30)] == [np.float32, np.float16, ml_dtypes.bfloat16]
    assert of_number(8, "t").nbytes((3, 64), "t") == 3 * 2 * 34
    assert of_number(0, "t").nbytes((), "t") == 4
    with pytest.raises(CheckpointError, match=r"^t has rows of 40 numbers: .* 32, the block of"):
        of_number(8, "t").nbytes((3, 40), "t")
    with pytest.raises(CheckpointError, match=r"^t has the type Q8_K \(15\), which is not read"):
        of_number(15, "t")
