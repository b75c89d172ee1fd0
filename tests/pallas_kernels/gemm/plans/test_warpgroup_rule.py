from __future__ import annotations

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpjax.kernels import WeightFormat
from mpjax.kernels.gemm import shapes
from mpjax.kernels.gemm.plans.configuration import WarpgroupConfig
from mpjax.kernels.gemm.plans.shared_memory import stages
from mpjax.kernels.gemm.plans.warpgroup_rule import ranked, warpgroups_by_rule, why_unsound
from mpjax.kernels.mosaic.launch import registers_per_thread
from tests.pallas_kernels.gemm.plans.problems import product

PACKED = WeightFormat.parse("uint4:g128")
FORMATS = (
    *("uint4:g32", "uint4:g128", "uint4:g128:sym", "uint8:g64", "float8:g128", "uint4:gK"),
    *("int8/int8", "float8:gK/float8", "table4:g64", "table3:g32", "table2:g256"),
    "liquid4:g64/int8",
)


@settings(max_examples=200)
@given(
    rows=st.integers(1, 9000),
    text=st.sampled_from(FORMATS),
    groups=st.integers(1, 200),
    tiles=st.integers(1, 900),
)
def test_every_ranked_configuration_is_sound(rows, text, groups, tiles):
    problem = product(rows, groups * 128, tiles * 64, text)
    format, found = problem.weight, ranked(problem)
    assert len(found) == len(set(found)) >= 2
    assert found[0] == warpgroups_by_rule(problem)
    for config in found:
        assert why_unsound(config, format) is None
        assert 1 <= config.splits <= problem.blocks
        # Sums beside a plane of operands, in what the launch gives to each thread; and beside the
        # addresses of both operands, in what is left by those that copy.
        launched = 65536 // (128 * (config.warpgroups + 1))
        assert max(config.products) // 2 + 32 <= launched
        assert config.tile_m // 2 + 32 <= registers_per_thread(config.warpgroups)
        for dtype in (jnp.bfloat16, jnp.float32):
            staged = stages(format, config, jnp.dtype(dtype))
            assert staged.x >= (4 if staged.parts > 1 else 2), "copies must overlap"


@pytest.mark.parametrize(
    ("name", "rows", "measured", "text"),
    [
        ("qwen3-8b.gate_up", 64, (64, 3, 1), "uint4:g128"),
        ("qwen3-8b.gate_up", 128, (128, 3, 1), "uint4:g128"),
        ("qwen3-8b.gate_up", 1024, (256, 2, 1), "uint4:g128"),
        ("qwen3-8b.output", 128, (128, 2, 4), "uint4:g128"),
        ("qwen3-8b.down", 256, (128, 2, 2), "uint4:g128"),
        ("llama3-70b.qkv", 64, (64, 3, 2), "uint4:g128"),
        ("llama3-70b.qkv", 256, (128, 3, 1), "uint4:g128"),
        ("qwen3-8b.down", 16, (16, 2, 2, 2), "uint4:g128"),
        ("qwen3-8b.output", 32, (32, 2, 2, 2), "uint4:g128"),
        ("qwen3-8b.gate_up", 16, (16, 3, 1), "uint4:g128"),
        ("llama3-70b.qkv", 16, (16, 3, 2), "uint4:g128"),
        ("llama3-70b.gate_up", 32, (32, 4, 1), "uint4:g128"),
        ("llama3-70b.qkv", 16, (16, 4, 3), "table4:g64"),
        ("llama3-70b.qkv", 64, (64, 3, 2), "table4:g64"),
        ("llama3-70b.qkv", 8, (8, 3, 2), "table3:g64"),
        ("llama3-70b.qkv", 16, (16, 3, 2), "table3:g64"),
        ("qwen3-8b.gate_up", 128, (128, 3, 1), "liquid4:g64/int8"),
        ("qwen3-8b.qkv", 512, (128, 3, 1), "liquid4:g64/int8"),
        ("qwen3-8b.down", 1024, (256, 2, 1), "liquid4:g64/int8"),
    ],
)
def test_the_model_finds_what_was_the_fastest(name, rows, measured, text):
    [shape] = shapes.named([name])
    found = warpgroups_by_rule(product(rows, shape.channels, shape.outputs, text))
    assert found == WarpgroupConfig(*measured)


def test_few_rows_have_tiles_of_their_own():
    for rows in (1, 8, 33, 40, 64):
        config = warpgroups_by_rule(product(rows))
        assert rows <= config.tile_m < rows + 8


def test_tiles_of_int8_have_rows_that_wgmma_has():
    for text, rows, height in (
        ("int8/int8", 50, 64),
        ("int8/int8", 24, 24),
        ("uint4:g128", 50, 56),
    ):
        found = ranked(product(rows, outputs=4096, text=text))
        assert {config.tile_m for config in found} == {height}
    reason = why_unsound(WarpgroupConfig(40, 2, 1), WeightFormat.parse("int8/int8"))
    assert "40 rows in a tile of 2 warpgroups; there can be a multiple of 16" in (reason or "")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (WarpgroupConfig(128, 5, 1), "5 warpgroups; there can be 2, 3, 4"),
        (WarpgroupConfig(64, 4, 1), "64 rows in a tile of 4 warpgroups"),
        (WarpgroupConfig(16, 3, 1, 2), "2 of 3 warpgroups can't share outputs: no divisor"),
        (WarpgroupConfig(64, 2, 1, 2), "2 warpgroups can't share outputs of 64 rows of uint4:g128"),
        (WarpgroupConfig(32, 4, 2, 4), "shared memory has no room for 2 tiles of x"),
        (WarpgroupConfig(256, 3, 1), "256 rows in a tile of 3 warpgroups"),
        (WarpgroupConfig(20, 2, 1), "multiple of 8, to 256"),
    ],
)
def test_a_reason_says_what_there_can_be(config, words):
    assert words in (why_unsound(config, PACKED) or "")


def test_a_matrix_has_tiles_of_two_products():
    format = WeightFormat.parse("float8:gK/float8")
    assert WarpgroupConfig(256, 3, 1).products == (128, 128)
    assert why_unsound(WarpgroupConfig(256, 3, 1), format) is None
    reason = why_unsound(WarpgroupConfig(144, 3, 1), format)
    assert "multiple of 32, to 256" in (reason or "")
    levels = WeightFormat.parse("liquid4:g64/int8")
    assert why_unsound(WarpgroupConfig(192, 3, 1), levels) is None
    reason = why_unsound(WarpgroupConfig(224, 3, 1), levels)
    assert "multiple of 32, to 192" in (reason or "")
    reason = why_unsound(WarpgroupConfig(136, 3, 1), PACKED)
    assert "multiple of 8, to 128" in (reason or "")
