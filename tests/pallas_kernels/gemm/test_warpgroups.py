from __future__ import annotations

import math

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import WeightFormat
from pallas_kernels.gemm import mosaic, shapes, warpgroups
from pallas_kernels.gemm.config import WarpgroupConfig
from tests.pallas_kernels.gemm.plans import H200, PACKED

GROUPED = ("uint4:g32", "uint4:g128", "uint4:g128:sym", "uint8:g64", "float8:g128")


@settings(max_examples=200)
@given(
    rows=st.integers(1, 9000),
    text=st.sampled_from(GROUPED),
    groups=st.integers(1, 200),
    tiles=st.integers(1, 900),
)
def test_every_ranked_configuration_is_sound(rows, text, groups, tiles):
    format = WeightFormat.parse(text)
    channels, outputs = groups * 128, tiles * 64
    found = warpgroups.ranked(rows, format, channels, outputs, H200)
    assert len(found) == len(set(found)) >= 2
    assert found[0] == warpgroups.warpgroup_config(rows, format, channels, outputs, H200)
    for config in found:
        assert warpgroups.why_unsound(config) is None
        assert 1 <= config.splits <= math.ceil(channels / format.block)
        # Sums beside a plane of operands, in what the launch gives to each thread.
        assert config.tile_m // 2 + 32 <= 65536 // (128 * (config.warpgroups + 1))
        for dtype in (jnp.bfloat16, jnp.float32):
            assert mosaic.x_stages(format, config, jnp.dtype(dtype)) >= 2, "copies must overlap"


@pytest.mark.parametrize(
    ("name", "rows", "measured"),
    [
        ("qwen3-8b.gate_up", 64, (64, 3, 1)),
        ("qwen3-8b.gate_up", 128, (128, 3, 1)),
        ("qwen3-8b.gate_up", 1024, (256, 2, 1)),
        ("qwen3-8b.output", 128, (128, 2, 4)),
        ("qwen3-8b.down", 256, (128, 2, 2)),
        ("llama3-70b.qkv", 64, (64, 3, 2)),
        ("llama3-70b.qkv", 256, (128, 3, 1)),
    ],
)
def test_the_model_finds_what_was_the_fastest(name, rows, measured):
    [shape] = shapes.named([name])
    found = warpgroups.warpgroup_config(rows, PACKED, shape.channels, shape.outputs, H200)
    assert found == WarpgroupConfig(*measured)


def test_few_rows_have_tiles_of_their_own():
    for rows in (1, 8, 33, 40, 64):
        config = warpgroups.warpgroup_config(rows, PACKED, 4096, 24576, H200)
        assert rows <= config.tile_m < rows + 8


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (WarpgroupConfig(128, 4, 1), "4 warpgroups; there can be 2 or 3"),
        (WarpgroupConfig(256, 3, 1), "256 rows in a tile of 3 warpgroups"),
        (WarpgroupConfig(20, 2, 1), "multiple of 8, to 256"),
    ],
)
def test_a_reason_says_what_there_can_be(config, words):
    assert words in (warpgroups.why_unsound(config) or "")


def test_times_grow_with_the_product():
    config = WarpgroupConfig(128, 3, 1)
    times = [
        warpgroups.microseconds(config, rows, PACKED, 4096, 24576, H200) for rows in (128, 256, 512)
    ]
    assert times == sorted(times)
    assert times[2] > 1.8 * times[1]
