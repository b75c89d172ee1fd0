from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.checkpoint.schemes.words import (
    pack_words,
    packing,
    uniform_format,
    unpack_words,
    usual_format,
)
from mpjax.kernels import WeightFormat


def specs(rows, columns):
    return {
        "qweight": jax.ShapeDtypeStruct((rows, columns), jnp.int32),
        "scales": jax.ShapeDtypeStruct((32, 4096), jnp.float16),
    }


@pytest.mark.parametrize(
    ("tensors", "method"),
    [
        (specs(4096, 512), "awq"),
        (specs(512, 4096), "gptq"),
        (specs(1024, 4096), "gptq"),
        (specs(4096, 1024), None),
        ({"weight": jax.ShapeDtypeStruct((4096, 4096), jnp.float16)}, None),
        ({**specs(4096, 512), "scales": jax.ShapeDtypeStruct((4096,), jnp.float16)}, None),
    ],
)
def test_packing_by_shapes(tensors, method):
    assert packing(tensors) == method


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("axis", [0, 1])
def test_unpack_words_reads_fields_from_the_lowest_bits_up(bits, axis):
    words = np.random.default_rng(bits).integers(-(2**31), 2**31, (6, 5), dtype=np.int32)
    per_word = 32 // bits
    shape = (6 * per_word, 5) if axis == 0 else (6, 5 * per_word)
    expected = np.empty(shape, np.int64)
    for row in range(shape[0]):
        for column in range(shape[1]):
            position = (row, column)[axis]
            word = words[row // per_word, column] if axis == 0 else words[row, column // per_word]
            expected[row, column] = (int(word) % 2**32) >> (bits * (position % per_word)) & (
                2**bits - 1
            )
    unpacked = unpack_words(jnp.asarray(words), bits, axis)
    assert unpacked.dtype == jnp.uint8
    np.testing.assert_array_equal(unpacked, expected)


@pytest.mark.parametrize(
    ("group_size", "found"), [(32, 32), (128, 128), (None, None), (256, None), (64, 64)]
)
def test_uniform_format(group_size, found):
    for bits in (4, 8):
        expected = WeightFormat(f"uint{bits}", found)
        assert uniform_format("up_proj", bits, group_size, 256) == expected


def test_usual_format():
    assert usual_format(4, 64) == WeightFormat("uint4", 64)
    for size in (None, 4096, 16):
        assert usual_format(8, size) == WeightFormat("uint8")


def test_packing_fills_the_last_word_with_zeros():
    fields = jnp.asarray([[1, 2, 15], [0, 0, 9]], jnp.uint8)
    np.testing.assert_array_equal(pack_words(fields, 4, axis=1), [[0xF21], [0x900]])
    np.testing.assert_array_equal(pack_words(fields, 8, axis=0), [[1, 2, 0x090F]])
    assert pack_words(fields, 8, axis=0).dtype == jnp.int32
