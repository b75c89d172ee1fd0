from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mpjax.checkpoint.schemes import writing
from mpjax.checkpoint.schemes.writing import Integers
from mpjax.kernels import WeightFormat
from tests.mpjax.checkpoint.schemes.plain import random_plain


def modules(*formats):
    return {f"map{i}": random_plain(format, (64, 8)) for i, format in enumerate(formats)}


def test_one_format():
    found = writing.only_format("awq", modules("uint4:g32", "uint4:g32:sym"))
    assert found == WeightFormat("uint4", 32)
    one, other = modules("int8", "int8").items()
    static = dataclasses.replace(one[1], activation_scale=np.ones(1, np.float32))
    with pytest.raises(ValueError, match="map0 has a static scale, map1 none: export with"):
        writing.are_static("int-quantized", {one[0]: static, other[0]: other[1]})
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


def test_channel_order():
    plain = random_plain("uint4:g32", (96, 8), permuted=True)
    codes, groups = writing.in_channel_order(plain)
    for row, channel in enumerate(np.asarray(plain.permutation)):
        np.testing.assert_array_equal(codes[channel], plain.codes[row])
        assert groups[channel] == row // 32
    codes, groups = writing.in_channel_order(random_plain("uint4", (96, 8)))
    np.testing.assert_array_equal(groups, np.zeros(96, np.int32))
