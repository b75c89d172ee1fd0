from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.errors import CheckpointError
from mpjax.checkpoint.linear import check_middle, check_scales, uniform_format, unpack_words
from mpjax.kernels import WeightFormat


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


def test_unpack_words_in_another_order():
    words = jnp.array([[0x03020100]], jnp.int32)
    np.testing.assert_array_equal(unpack_words(words, 8, 1, (3, 1, 2, 0)), [[3, 1, 2, 0]])


@pytest.mark.parametrize(
    ("group_size", "found"), [(32, 32), (128, 128), (None, None), (256, None), (64, 64)]
)
def test_uniform_format(group_size, found):
    for bits in (4, 8):
        expected = WeightFormat(f"uint{bits}", found)
        assert uniform_format("up_proj", bits, group_size, 256) == expected


def test_uniform_format_refuses_other_groups():
    with pytest.raises(CheckpointError, match=r"^up_proj has groups of 16 input .* of all 256 "):
        uniform_format("up_proj", 4, 16, 256)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_check_scales(dtype):
    scales = jnp.ones((4, 6), dtype)
    check_scales("model.layers.0.mlp.up_proj", scales)
    damaged = scales.at[0, 1].set(jnp.nan).at[2, 3].set(jnp.inf).at[3, 5].set(-jnp.inf)
    with pytest.raises(CheckpointError, match=r"^model\.layers\.0\.mlp\.up_proj: 3 of the 24"):
        check_scales("model.layers.0.mlp.up_proj", damaged)


def test_zero_points_in_the_middle():
    zeros = jnp.full((2, 8), 8, jnp.uint16)
    check_middle("up_proj", zeros, 4, "sym: true")
    message = r"up_proj\.qzeros has zero points from 8 to 8, but by .* \(sym: true\) all are 128"
    with pytest.raises(CheckpointError, match=message):
        check_middle("up_proj", zeros, 8, "sym: true")
    with pytest.raises(CheckpointError, match="zero points from 8 to 9"):
        check_middle("up_proj", zeros.at[1, 7].set(9), 4, "sym: true")

    def traced(zeros):
        check_middle("up_proj", zeros, 8, "sym: true")
        return zeros

    jax.jit(traced)(zeros)  # where no value is known
