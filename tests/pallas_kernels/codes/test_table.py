from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import WeightFormat, codes
from mpjax.kernels.codes.look_up import InBoth, InSharedRows
from mpjax.kernels.codes.table import normal_float
from mpjax.kernels.target import tracing_for
from tests.pallas_kernels.codes.decoding import bits_of
from tests.pallas_kernels.numpy_ptx import SharedRows
from tests.pallas_kernels.oracles import NUMPY_DTYPES, table_codes
from tests.sweeps import combinations

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


@pytest.mark.parametrize(
    ("bits", "has_registers", "expected"),
    [(2, True, InBoth), (3, True, InBoth), (3, False, InSharedRows), (4, True, InSharedRows)],
)
def test_registers_that_are_to_spare_hold_small_tables(bits, has_registers, expected):
    table, operand = normal_float(bits), jnp.dtype("float16")
    with tracing_for(SharedRows(1, has_spare_registers=has_registers)):
        kind = codes.of(WeightFormat.parse(f"table{bits}:g32"))
        shared = kind.shared(table, operand, 2)
        assert len(shared) == len(expected().prepare(table, bits, operand, 2))


@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float16"])
def test_parameters_are_a_scale(scale_dtype):
    scales = np.array([0.5, -3e-3, 6e-8, 1e4], NUMPY_DTYPES[scale_dtype])
    group = codes.of(WeightFormat.parse("table4:g32")).load(
        jnp.asarray(scales.view(np.uint16).astype(np.uint32)),
        scale_dtype,
        jnp.dtype("bfloat16"),
        64,
    )
    assert group.scale is not None
    np.testing.assert_array_equal(group.scale, scales.astype(np.float32)[:, None])


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
