"""Codes that are floats, and indices of tables."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mpjax.kernels import PlainCodes, WeightFormat, codes, pack, quantize
from mpjax.kernels.codes import look_up as look_ups
from mpjax.kernels.codes.look_up import (
    InBoth,
    InRegisters,
    InSharedMemory,
    InSharedRows,
    LookUp,
)
from mpjax.kernels.codes.table import normal_float
from mpjax.kernels.target import tracing_for
from tests.pallas_kernels import numpy_ptx
from tests.pallas_kernels.codes import decoding
from tests.pallas_kernels.codes.decoding import bits_of
from tests.pallas_kernels.oracles import E2M1, NUMPY_DTYPES, table_codes
from tests.sweeps import combinations


def operands(format: WeightFormat) -> list[str]:
    if format.operand is None:
        return ["bfloat16", "float16"]
    return ["int8" if format.operand == "int8" else "float8_e4m3fn"]


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    "text",
    [
        *("uint4:g32", "uint4:g128", "uint8:g32", "uint8:gK", "uint4:g64:sym", "table4:g32"),
        *("table4:g256", "table3:g64", "table2:g32", "table2:g64", "float8:gK", "float8:gK/float8"),
        *("int8/int8", "liquid4:g64/int8"),
    ],
)
def test_decoders_lower_for_cuda(text, lower_for_cuda):
    """In every width, from the type of words that the format has."""
    format = WeightFormat.parse(text)
    kind = codes.of(format)
    word = kind.code_dtype if format.is_flat else jnp.dtype(f"uint{format.word_bits}")
    rows, width = decoding.TILE // format.plane_width, format.plane_width
    lowered = functools.partial(
        decoding.decode_words,
        format=format,
        scale_dtype=kind.scale_dtypes[0],
        interpret=False,
    )
    for operand in operands(format):
        text = lower_for_cuda(
            functools.partial(lowered, operand=operand),
            jax.ShapeDtypeStruct((rows, format.columns * width), word),
            jax.ShapeDtypeStruct((rows,), jnp.uint32),
            jax.ShapeDtypeStruct((2**format.bits,), jnp.float32) if kind.has_table else None,
        )
        assert ("elementwise_inline_asm" in text) != format.is_flat


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
WORDS = np.arange(2**16, dtype=np.uint16).reshape(2048, 32)
KIND = codes.of(WeightFormat("float4", 32))


@pytest.mark.parametrize("operand", ["bfloat16", "float16"])
def test_all_words_decode_to_their_codes_values(decode, operand):
    parameters = np.full(2048, 127, np.uint32)
    planes = decode(WORDS, parameters, format="float4:g32", operand=operand, scale_dtype="bfloat16")
    for plane, values in enumerate(planes):
        expected = E2M1[WORDS >> (4 * plane) & 15].astype(NUMPY_DTYPES[operand])
        np.testing.assert_array_equal(bits_of(values), bits_of(expected))


def test_all_codes_with_all_scales():
    """Every power of two of e8m0, exact but for float32's subnormals, zeros to XLA on a CPU."""
    scales = np.ldexp(1.0, np.arange(-127, 128))  # [255]
    matrix = np.tile(np.arange(16, dtype=np.uint8).repeat(2)[:, None], (1, len(scales)))
    plain = PlainCodes(
        "float4:g32", jnp.asarray(matrix), jnp.asarray(scales.astype(BFLOAT16)[None])
    )
    with np.errstate(over="ignore"):  # 4 · 2**127 and more are infinite in float32
        expected = (E2M1[matrix] * scales).astype(np.float32)
    smallest = np.abs(expected) < np.finfo(np.float32).tiny
    for found in (plain.dequantize(), pack(plain).dequantize()):
        array = np.asarray(found)
        np.testing.assert_array_equal(array[~smallest], expected[~smallest])
        assert (np.abs(array[smallest]) < np.finfo(np.float32).tiny).all()


def test_values_round_to_the_nearest_and_ties_to_even():
    grid = np.linspace(-7, 7, 1121, dtype=np.float32)
    found = KIND.nearest(
        jnp.asarray(grid),
        KIND.fit(jnp.asarray(grid)[None, :, None], None)._replace(
            scales=jnp.ones((), jnp.bfloat16)
        ),
    )
    expected = np.clip(grid, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(np.abs(E2M1[np.asarray(found)]), np.abs(expected))
    np.testing.assert_array_equal(np.sign(E2M1[np.asarray(found)]), np.sign(expected))


def test_scales_are_powers_of_two(rng):
    weight = rng.standard_normal((64, 5)).astype(np.float32) * 2.0 ** rng.integers(-20, 20, 5)
    packed = quantize(jnp.asarray(weight), "float4:g32")
    scales = np.asarray(packed.scales()).astype(np.float64)[:2]
    peak = np.abs(weight.reshape(2, 32, 5)).max(1)
    np.testing.assert_array_equal(scales, 2.0 ** (np.floor(np.log2(peak)) - 2))
    zeros = quantize(jnp.zeros((32, 2)), "float4:g32")
    np.testing.assert_array_equal(zeros.scales()[:1], np.ones((1, 2)))
    error = np.abs(np.asarray(packed.dequantize()) - weight) / np.abs(weight).mean()
    assert error.mean() < 0.2


def test_a_word_has_the_exponents_of_four_groups():
    """All 256 bytes of e8m0, in each place of a word; 255 is NaN, and infinite in a kernel."""
    exponents = np.stack([np.roll(np.arange(256), i) for i in range(4)]).astype(np.uint8)
    words = np.ascontiguousarray(exponents.T).view("<u4").reshape(1, 256)
    expected = np.ldexp(1.0, exponents.astype(int) - 127)
    expected[exponents == 255] = np.nan
    scales, _ = KIND.unpack_parameters(jnp.asarray(words), "bfloat16")
    np.testing.assert_array_equal(np.asarray(scales, np.float64), expected)
    zeros = jnp.zeros(scales.shape, jnp.uint16)
    np.testing.assert_array_equal(KIND.pack_parameters(scales, zeros), words)
    expected[exponents == 255] = np.inf
    parts = KIND.split_parameters(jnp.asarray(words[0]))
    for part, wanted in zip(parts, expected, strict=True):
        group = KIND.load(part, "bfloat16", jnp.dtype("bfloat16"), 32)
        np.testing.assert_array_equal(np.asarray(group.scale)[:, 0], wanted)
        assert jax.tree.leaves(group.arguments)[0].shape == (256, 1)


@pytest.mark.parametrize("value", [3.0, -1.0, np.inf])
def test_only_powers_of_two_are_packed(value):
    scales = jnp.full((2, 3), value, jnp.bfloat16).at[0].set(2.0**-127)
    plain = PlainCodes("float4:g32", jnp.zeros((64, 3), jnp.uint8), scales)
    with pytest.raises(ValueError, match=f"scales of float4 are {value:.4g}, among others: expec"):
        pack(plain)


E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
ALL_WORDS = np.arange(2**16, dtype=np.uint16).reshape(64, 1024)
SCALES = np.geomspace(1e-6, 10, 64).astype(np.float32)


@pytest.mark.parametrize("operand", ["bfloat16", "float16"])
def test_all_words_decode_to_their_bytes_values(decode, operand):
    planes = decode(
        ALL_WORDS,
        SCALES.view(np.uint32),
        format="float8:g128",
        operand=operand,
        scale_dtype="float32",
    )
    assert planes.dtype == NUMPY_DTYPES[operand]
    for plane, values in enumerate(planes):
        encoded = (ALL_WORDS >> (8 * plane) & 0xFF).astype(np.uint8)
        expected = encoded.view(E4M3).astype(np.float32)
        # e4m3 has one NaN of each sign; read by its bits, it would be 480.
        expected = np.where(encoded & 0x7F == 0x7F, 480 * (1 - (encoded >> 7) * 2.0), expected)
        expected = expected.astype(NUMPY_DTYPES[operand])
        np.testing.assert_array_equal(bits_of(values), bits_of(expected))


each_operand = pytest.mark.parametrize("operand", ["bfloat16", "float16"])

# QLoRA's table, as published, and those of FLUTE's formula, in decimals.
PUBLISHED = {
    2: [-1, 0, 0.3379151367, 1],
    3: [-1, -0.4786290853, -0.2171417800, 0, 0.1609301444, 0.3379151367, 0.5626168880, 1],
    4: [
        *[-1, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453],
        *[-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0],
        *[0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224],
        *[0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1],
    ],
}


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_normal_float_is_as_published(bits):
    table = normal_float(bits)
    assert table.dtype == np.float32
    np.testing.assert_allclose(table, PUBLISHED[bits], rtol=0, atol=1e-6)
    assert (np.diff(table) > 0).all()
    assert bits_of(table)[2 ** (bits - 1) - 1] == 0  # not −0, nor nearly zero
    assert (table[0], table[-1]) == (-1, 1)


def all_words(rng: np.random.Generator) -> np.ndarray:
    """uint16 [128, 1024]: all words at even and at odd lanes, each beside another."""
    every = np.arange(2**16, dtype=np.uint16)
    return np.stack([every, rng.permutation(every)], 1).reshape(128, 1024)


def tables(rng: np.random.Generator, bits: int, operand: str) -> list[np.ndarray]:
    """Normal float, and a table of random bits: any normal numbers of `operand`, of both signs."""
    dtype = NUMPY_DTYPES[operand]
    signs = rng.integers(0, 2, 2**bits) << 15
    exponent_bits = 8 if operand == "bfloat16" else 5
    lowest, infinity = 1 << (15 - exponent_bits), (2**exponent_bits - 1) << (15 - exponent_bits)
    patterns = rng.integers(lowest, infinity, 2**bits) | signs
    return [normal_float(bits), patterns.astype(np.uint16).view(dtype).astype(np.float32)]


def assert_decodes(decode, words: np.ndarray, bits: int, operand: str, rng) -> None:
    format = f"table{bits}:g32"
    columns = np.split(words, 3 if bits == 3 else 1, axis=1)
    parameters = np.full(len(words), 0x3C00, np.uint32)
    expected = [table_codes(columns, plane, bits) for plane in range(len(columns) * 16 // bits)]
    for table in tables(rng, bits, operand):
        rounded = table.astype(NUMPY_DTYPES[operand])
        planes = decode(words, parameters, table, format=format, operand=operand)
        assert planes.dtype == NUMPY_DTYPES[operand]
        for values, indices in zip(planes, expected, strict=True):
            np.testing.assert_array_equal(bits_of(values), bits_of(rounded[indices]))


@combinations(1, bits=[2, 4], operand=["bfloat16", "float16"])
def test_all_words_decode_to_entries_of_the_table(decode, bits, operand, rng):
    assert_decodes(decode, all_words(rng), bits, operand, rng)


@each_operand
def test_columns_of_three_bits_decode_to_entries_of_the_table(decode, operand, rng):
    # Every word in every column, beside random words in the other two.
    columns = [rng.permutation(2**16).astype(np.uint16).reshape(64, 1024) for _ in range(3)]
    assert_decodes(decode, np.concatenate(columns, 1), 3, operand, rng)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("words", [2, 6])
def test_packing_keeps_every_bit(bits, words, rng):
    """Random words are the packing of their own codes: no bit is padding."""
    kind = codes.of(WeightFormat.parse(f"table{bits}:g32"))
    columns = 3 if bits == 3 else 1
    stored = rng.integers(0, 2**16, (5, columns, words), dtype=np.uint16)
    unpacked = np.asarray(jax.jit(kind.unpack)(stored))
    for plane in range(columns * 16 // bits):
        expected = table_codes([stored[:, column] for column in range(columns)], plane, bits)
        np.testing.assert_array_equal(unpacked[:, plane], expected)
    np.testing.assert_array_equal(jax.jit(kind.pack)(unpacked), stored)


class Reference:
    """A table as kernels have it: `load` is given what `at` says."""

    def __init__(self, values: np.ndarray) -> None:
        self.at = jnp.asarray(values, jnp.float32)


@pytest.fixture
def arrays_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look_ups, "load", lambda values: values)


def every_pair(entries: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Words whose bytes are all pairs of codes, two registers at a time; and the two codes."""
    low, high = (code.reshape(-1, 2) for code in np.indices((entries, entries)).reshape(2, -1))
    return (low | high << 4 | low << 8 | high << 12).astype(np.uint16), low, high


@pytest.mark.parametrize(
    ("look_up", "bits"),
    [
        *((InRegisters(), 2), (InRegisters(), 3), (InSharedMemory(), 4)),
        *((InSharedRows(), 2), (InSharedRows(), 3), (InSharedRows(), 4)),
        *((InBoth(), 2), (InBoth(), 3)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, LookUp) else str(value),
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.usefixtures("arrays_are_loaded")
def test_every_pair_of_codes_is_found(look_up: LookUp, bits, dtype, interpreted_ptx, rng):
    values = rng.standard_normal(2**bits).astype(np.float32)
    words, low, high = every_pair(2**bits)
    if isinstance(look_up, InSharedRows | InBoth):
        with tracing_for(numpy_ptx.SharedRows(len(words))):
            prepared = look_up.prepare(values, bits, jnp.dtype(dtype), words.shape[1])
    else:
        prepared = look_up.prepare(Reference(values), bits, jnp.dtype(dtype), words.shape[1])
    decode = look_up.decoder(lambda quad: jnp.asarray(words), prepared, jnp.dtype(dtype))
    values = values.astype(jnp.dtype(dtype))
    for plane in range(8):
        # Planes 0 and 1 of four lie in the lower word of a register, 2 and 3 in the upper one.
        word = plane % 4 // 2
        expected = np.stack([values[low[:, word]], values[high[:, word]]], 1)
        np.testing.assert_array_equal(decode(plane), expected)
