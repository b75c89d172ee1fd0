from __future__ import annotations

import jax.numpy as jnp
import pytest

from mpjax.kernels import WeightFormat
from mpjax.kernels.device import Limits
from mpjax.kernels.experts.plans import ExpertsWarpgroupConfig
from mpjax.kernels.gemm.plans.configuration import TritonConfig, WarpgroupConfig
from mpjax.kernels.gemm.plans.shared_memory import stages, triton_bytes, why_no_room


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
        ("bfloat16", WarpgroupConfig(256, 2, 1), (3, 3, 1), True),
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
    assert config.product_rows == (96, 96)
    assert stages(format, config, jnp.dtype(jnp.bfloat16)).out_rows == 32


def test_a_tile_on_its_way_out_makes_room():
    config, format = WarpgroupConfig(128, 3, 1), WeightFormat.parse("table4:g64")
    assert stages(format, config, jnp.dtype(jnp.bfloat16)) == (2, 4, 4, 64, 1)
    assert stages(format, config, jnp.dtype(jnp.float32)) == (2, 4, 4, 32, 1)


def test_products_of_experts_are_written_out_through_several_tiles():
    """As many as there are parts of a tile, or as memory has room for beside the tiles of x."""
    format, found = WeightFormat.parse("uint4:g128"), []
    for rows, dtype in ((80, "bfloat16"), (224, "bfloat16"), (224, "float32")):
        config = ExpertsWarpgroupConfig(rows, 2, 1)
        dense = stages(format, WarpgroupConfig(rows, 2, 1), jnp.dtype(dtype), gated=True)
        staged = stages(format, config, jnp.dtype(dtype), gated=True)
        assert staged[:4] == dense[:4]
        assert dense.out_tiles == 1
        found.append((staged.out_rows, staged.out_tiles))
    assert found == [(16, 5), (32, 3), (32, 1)]


# The bytes that Triton asked for, as the compiler reported it for a GPU that had too little.
REQUESTED = [
    ("uint4:g128", 9.0, (16, 64, 1, 2, 3), 33792),
    ("uint4:g128", 9.0, (64, 64, 1, 4, 3), 115712),
    ("uint4:g128", 9.0, (128, 128, 1, 8, 3), 231424),
    ("uint4:g128", 8.0, (128, 128, 1, 8, 3), 165888),
    ("uint4:g128", 8.9, (128, 128, 1, 8, 2), 82944),
    ("uint4:g32", 9.0, (64, 64, 1, 4, 3), 59392),
    ("uint4:gK", 9.0, (128, 64, 1, 4, 2), 139264),
    ("uint8:g128", 9.0, (64, 128, 1, 8, 3), 82944),
    ("float8:gK", 9.0, (256, 64, 1, 4, 3), 212992),
    ("int8/int8", 9.0, (128, 128, 1, 8, 2), 65536),
    ("int8/int8", 8.0, (32, 128, 1, 8, 3), 40960),
]


@pytest.mark.parametrize(("text", "capability", "sizes", "requested"), REQUESTED)
def test_shared_memory_is_what_the_compiler_takes(text, capability, sizes, requested):
    limits = Limits(132, capability)
    assert triton_bytes(TritonConfig(*sizes), WeightFormat.parse(text), limits) == requested
