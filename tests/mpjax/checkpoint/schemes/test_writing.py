from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.checkpoint.schemes import writing
from mpjax.checkpoint.schemes.writing import Integers
from mpjax.kernels import WeightFormat
from tests.mpjax.checkpoint.schemes.plain import random_plain


def modules(*formats):
    return {f"map{i}": random_plain(format, (64, 8)) for i, format in enumerate(formats)}


def test_codes():
    writing.require_codes("awq", modules("uint4:g32", "uint4"), ("uint4",))
    with pytest.raises(
        ValueError, match=r"'awq' holds uint4, and map1 is W8A8 \(int8:gK/int8\): e"
    ):
        writing.require_codes("awq", modules("uint4:g32", "int8"), ("uint4",))
    permuted = {"map": random_plain("uint4:g32", (64, 8), permuted=True)}
    writing.require_codes("gptq", permuted, ("uint4",))
    with pytest.raises(ValueError, match=r"no place for the order .* of map \(act-order\): take x"):
        writing.require_codes("awq", permuted, ("uint4",), permuted="take x")


def test_one_format():
    found = writing.only_format("awq", modules("uint4:g32", "uint4:g32:sym"))
    assert found == WeightFormat("uint4", 32)
    with pytest.raises(ValueError, match="one format, and map0 is W4g32, map1 W4g64: export with"):
        writing.only_format("awq", modules("uint4:g32", "uint4:g64"))


def test_integers_are_symmetric_where_all_of_a_kind_are():
    found = writing.integers_of(
        modules("uint4:g32:sym", "uint8:sym", "uint4:g32", "uint4:g64:sym", "uint8:sym")
    )
    skewed, eight = Integers(4, 32, False), Integers(8, None, True)
    assert [*found.values()] == [skewed, eight, skewed, Integers(4, 64, True), eight]
    assert writing.most_common(found) == skewed


def test_zero_points():
    plain = random_plain("uint4:g32", (64, 8))
    assert writing.zero_points(plain) is plain.zeros
    symmetric = random_plain("uint8:g32:sym", (64, 8))
    for zeros in (symmetric.zeros, None):
        found = writing.zero_points(dataclasses.replace(symmetric, zeros=zeros))
        np.testing.assert_array_equal(found, np.full((2, 8), 128, np.uint16))


def test_zero_points_beyond_a_layout():
    zeros = jnp.asarray([[0, 3, 16]], jnp.uint16)
    writing.require_zeros("x", "map", zeros, 0, 16)
    with pytest.raises(ValueError, match="'x' holds zero points from 1 to 16, and map has them f"):
        writing.require_zeros("x", "map", zeros, 1, 16)
    with pytest.raises(ValueError, match="from 0 to 16: take y"):
        writing.require_zeros("x", "map", zeros, 0, 15, "take y")
    jax.eval_shape(lambda zeros: writing.require_zeros("x", "map", zeros, 1, 15), zeros)


def test_channel_order():
    plain = random_plain("uint4:g32", (96, 8), permuted=True)
    codes, groups = writing.in_channel_order(plain)
    for row, channel in enumerate(np.asarray(plain.permutation)):
        np.testing.assert_array_equal(codes[channel], plain.codes[row])
        assert groups[channel] == row // 32
    codes, groups = writing.in_channel_order(random_plain("uint4", (96, 8)))
    np.testing.assert_array_equal(groups, np.zeros(96, np.int32))


def test_columns():
    writing.require_columns("awq", "map", 16, 8)
    with pytest.raises(ValueError, match="'awq' packs 8 output channels in a word, and map has 12"):
        writing.require_columns("awq", "map", 12, 8)
