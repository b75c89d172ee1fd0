from __future__ import annotations

import jax.numpy as jnp
import pytest

from mpjax.kernels import WeightFormat
from mpjax.kernels.gemm.config import WarpgroupConfig
from mpjax.kernels.gemm.stages import stages, why_no_room


@pytest.mark.parametrize(
    ("text", "config", "expected", "is_room"),
    [
        ("uint4:g128", WarpgroupConfig(256, 2, 1), (2, 4, 4), True),
        ("uint4:g128", WarpgroupConfig(64, 3, 1), (2, 8, 4), True),
        ("uint4:g128", WarpgroupConfig(2048, 2, 1), (2, 0, 4), False),
        ("uint4:g128", WarpgroupConfig(16, 2, 1), (8, 8, 1), True),
        ("uint4:g128", WarpgroupConfig(32, 2, 2, 2), (4, 4, 1), True),
        ("uint4:g128", WarpgroupConfig(32, 4, 2, 4), (1, 1, 1), False),
        ("int8/int8", WarpgroupConfig(256, 2, 1), (3, 3, 1), True),
        ("liquid4:g64/int8", WarpgroupConfig(256, 2, 1), (4, 4, 1), True),
        ("liquid4:g64/int8", WarpgroupConfig(16, 3, 1), (8, 8, 1), True),
        ("uint4:g32", WarpgroupConfig(16, 2, 1), (8, 8, 1), True),
        ("uint4:g128", WarpgroupConfig(16, 3, 2), (4, 4, 1), True),
        # 64 KiB for the pairs of sixteen values, and 30 for those of eight
        ("table4:g64", WarpgroupConfig(16, 3, 1), (4, 4, 1), True),
        ("table4:g64", WarpgroupConfig(256, 2, 1), (2, 2, 4), False),
        ("table4:g64", WarpgroupConfig(128, 3, 1), (2, 4, 4), True),
        ("table3:g64", WarpgroupConfig(16, 3, 1), (3, 3, 1), True),
        ("table3:g64", WarpgroupConfig(256, 2, 1), (2, 4, 16), True),
    ],
)
def test_there_are_as_many_stages_as_there_is_room_for(text, config, expected, is_room):
    assert stages(WeightFormat.parse(text), config, jnp.dtype(jnp.float32))[:3] == expected
    assert (why_no_room(WeightFormat.parse(text), config) is None) == is_room


@pytest.mark.parametrize(("rows", "expected"), [(8, 8), (24, 8), (64, 64), (96, 32), (256, 64)])
def test_a_tile_on_its_way_out_is_a_whole_part(rows, expected):
    config, format = WarpgroupConfig(rows, 2, 1), WeightFormat.parse("uint4:g128")
    assert stages(format, config, jnp.dtype(jnp.bfloat16)).out_rows == expected


def test_a_tile_on_its_way_out_is_of_one_product():
    config, format = WarpgroupConfig(192, 3, 1), WeightFormat.parse("int8/int8")
    assert config.products == (96, 96)
    assert stages(format, config, jnp.dtype(jnp.bfloat16)).out_rows == 32


def test_a_tile_on_its_way_out_makes_room():
    config, format = WarpgroupConfig(128, 3, 1), WeightFormat.parse("table4:g64")
    assert stages(format, config, jnp.dtype(jnp.bfloat16)) == (2, 4, 4, 64)
    assert stages(format, config, jnp.dtype(jnp.float32)) == (2, 4, 4, 32)
