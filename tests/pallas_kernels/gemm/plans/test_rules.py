"""The rules that plan products where no table has a plan."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpjax.kernels import UnsupportedError, WeightFormat
from mpjax.kernels.device import Limits
from mpjax.kernels.gemm import shapes
from mpjax.kernels.gemm.plans.configuration import WarpgroupConfig
from mpjax.kernels.gemm.plans.limits import why_not_warpgroups
from mpjax.kernels.gemm.plans.rule import plan_by_rule
from mpjax.kernels.gemm.plans.shared_memory import stages
from mpjax.kernels.gemm.plans.triton_rule import triton_by_rule
from mpjax.kernels.gemm.plans.warpgroup_rule import ranked, warpgroups_by_rule, why_unsound
from mpjax.kernels.mosaic.launch import registers_per_thread
from mpjax.kernels.plans.plan import Plan
from tests.pallas_kernels.gemm.plans.problems import (
    EIGHT_BITS,
    H200,
    WITHOUT_WGMMA,
    any_problem,
    assert_sound,
    product,
)


@settings(max_examples=200)
@any_problem
def test_plans_are_sound_for_any_problem(problem):
    plan = plan_by_rule(problem)
    if plan.implementation == "mosaic":
        assert plan.config == warpgroups_by_rule(problem)
        assert why_not_warpgroups(problem) is None
        return
    assert (plan.config is None) == (plan.implementation != "triton")
    if plan.implementation == "xla":
        assert str(problem.format) in EIGHT_BITS
    if problem.weight.operand == "float8" and problem.limits.compute_capability < 8.9:
        assert plan == Plan("dequantize")
        return
    config = triton_by_rule(problem)
    assert plan.config in (None, config)
    assert_sound(config, problem)


OTHER = Limits(108, 8.0)


@pytest.mark.parametrize(
    ("text", "limits", "outputs", "expected"),
    [
        # Warpgroups multiply many rows, and of few rows 4 bits and tables; most rows aren't fused.
        *(
            (text, H200, 24576, "31 triton, 33 mosaic, 4096 mosaic, 4097 dequantize")
            for text in ("uint4:g32", "uint8:g32:sym", "float8:gK")
        ),
        ("uint4:g128", H200, 24576, "7 triton, 8 mosaic, 23 triton, 24 mosaic, 4097 mosaic"),
        ("uint4:gK:sym", H200, 24576, "31 triton, 32 mosaic, 33 mosaic, 4097 mosaic"),
        ("uint8", H200, 24576, "8 triton, 32 triton"),
        ("table4:g64", H200, 4096, "7 mosaic, 8 mosaic, 9 triton, 2048 mosaic, 2049 dequantize"),
        *(
            (text, H200, 24576, "7 mosaic, 8 mosaic, 31 triton")
            for text in ("table3:g128", "table2:g32")
        ),
        *(
            (text, H200, 24576, "32 triton, 33 mosaic, 4096 mosaic, 50000 mosaic")
            for text in ("int8/int8", "float8:gK/float8", "liquid4:g64/int8")
        ),
        ("float4:g32", H200, 24576, "64 triton"),
        # What they can't multiply is left to others.
        ("float8:g128/float8", H200, 4096, "64 triton"),
        ("uint4:g128", H200, 4100, "64 triton"),
        ("uint4:g128", OTHER, 4096, "64 triton"),
        ("uint4:g128", WITHOUT_WGMMA, 4096, "64 triton, 257 dequantize"),
        ("table4:g64", WITHOUT_WGMMA, 4096, "64 triton, 128 triton, 129 dequantize"),
        ("float8:gK/float8", WITHOUT_WGMMA, 4096, "33 xla"),
        ("int8/int8", WITHOUT_WGMMA, 24576, "8192 triton"),
        ("liquid4:g64/int8", WITHOUT_WGMMA, 24576, "2048 triton, 2049 dequantize"),
        ("liquid4:g64/int8", H200, 24570, "2048 triton, 2049 dequantize"),
    ],
)
def test_the_rule_chooses(text, limits, outputs, expected):
    for case in expected.split(", "):
        rows, name = case.split()
        problem = product(int(rows), outputs=outputs, text=text, limits=limits)
        assert plan_by_rule(problem).implementation == name, rows


def test_warpgroups_may_be_asked_for_or_left_out():
    assert why_not_warpgroups(product(64, text="float4:g32")) is None
    problem = product(64)
    assert plan_by_rule(problem).implementation == "mosaic"
    assert plan_by_rule(problem, warpgroups=False) == Plan("triton", triton_by_rule(problem))


@settings(max_examples=200)
@any_problem
def test_configurations_are_sound_for_any_problem(problem):
    if problem.weight.operand == "float8" and problem.limits.compute_capability < 8.9:
        with pytest.raises(UnsupportedError, match=r"fused kernel can't multiply .*8\.9"):
            triton_by_rule(problem)
        return
    config = triton_by_rule(problem)
    assert_sound(config, problem)
    assert config.tile_m <= max(8, 2 * problem.rows), "the rows of a tile are mostly padding"


@pytest.mark.parametrize(
    ("text", "shape", "rows", "expected"),
    [
        ("uint4:g128", "4096x24576", 1, "8 64 1 4 3 accumulator"),
        ("uint4:g128", "4096x24576", 16, "16 64 1 4 3 accumulator"),
        ("uint4:g128", "4096x24576", 32, "32 64 1 4 3 accumulator"),
        ("uint4:g128", "4096x24576", 64, "64 64 1 4 3 weight"),
        (
            "uint4:g128",
            "4096x24576",
            128,
            "128 128 2 8 3 weight 16896",
        ),  # 60 of 192 tiles are left over, and split
        ("uint4:g128", "4096x24576", 256, "128 128 1 8 3 weight"),
        ("uint4:g128", "4096x4096", 16, "16 64 4 4 3 accumulator"),
        ("uint4:g128", "4096x4096", 128, "128 64 2 4 3 weight"),  # too few tiles for the largest
        ("uint4:g128", "4096x4096", 256, "128 64 1 4 3 weight"),
        ("uint4:g128", "12288x4096", 128, "128 128 4 8 3 weight"),
        ("uint4:g128", "8192x57344", 128, "128 128 2 8 3 weight 50688"),
        (
            "uint4:g128",
            "8192x10240",
            128,
            "128 128 3 8 3 weight",
        ),  # 240 programs in two rounds of a third of K
        ("uint4:g128", "8192x8192", 128, "128 64 1 4 3 weight"),  # partial sums would cost more
        ("uint4:g128", "8192x10240", 16, "16 64 3 2 3 accumulator"),  # 480 programs have two warps
        ("uint4:g128", "8192x8192", 16, "16 64 4 2 3 accumulator"),
        ("uint4:g128", "8192x10240", 256, "128 128 4 8 3 weight 8448"),  # 28 of 160
        (
            "uint4:g128",
            "5120x13824",
            256,
            "128 128 1 8 3 weight",
        ),  # 84 of 216: half of K would need two rounds
        ("uint4:g128:sym", "4096x24576", 1, "8 64 1 4 3 weight"),
        ("uint4:g128:sym", "4096x24576", 256, "128 128 1 8 3 weight"),
        (
            "liquid4:g64/int8",
            "4096x24576",
            16,
            "16 64 1 4 4 accumulator",
        ),  # without scales of groups: loaded further ahead
        ("int8/int8", "4096x24576", 16, "16 64 1 4 4 accumulator"),
        ("float8:gK", "4096x24576", 16, "16 64 1 4 4 accumulator"),
        ("uint8:g128", "4096x24576", 16, "16 64 1 4 3 accumulator"),
        (
            "uint8:g128",
            "4096x24576",
            128,
            "128 64 1 4 2 weight",
        ),  # two programs share a multiprocessor
        ("float8:g128", "4096x24576", 128, "128 64 1 4 2 weight"),
        ("uint8:g128", "4096x4096", 128, "128 64 2 4 3 weight"),
        ("float4:g32", "2880x4096", 16, "16 64 4 4 3 weight"),  # a block is one product
        ("uint4:g32", "2880x4096", 16, "16 64 4 4 3 accumulator"),
        ("table4:g64", "4096x24576", 32, "32 64 1 4 2 weight"),
        ("table4:g64", "4096x24576", 33, "64 64 1 4 2 weight 32"),
        ("table4:g64", "4096x24576", 65, "64 128 1 4 2 weight 32"),
        ("table3:g64", "4096x24576", 32, "32 64 1 4 2 weight"),
        ("table3:g64", "4096x24576", 65, "64 64 1 4 3 weight"),  # a wider tile would spill
    ],
)
def test_tiles_of_the_rule(text, shape, rows, expected):
    config = triton_by_rule(product(rows, *map(int, shape.split("x")), text))  # type: ignore[call-arg]
    fields = [str(field) for field in dataclasses.astuple(config) if field is not None]
    assert " ".join(fields) == expected


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
        assert max(config.product_rows) // 2 + 32 <= launched
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


@pytest.mark.parametrize(
    ("text", "rows", "height"),
    [
        *(("uint4:g128", 50, 56), ("uint4:g128", 8, 8), ("uint4:g128", 33, 40)),
        *(("int8/int8", 50, 64), ("int8/int8", 24, 24)),
    ],
)
def test_few_rows_have_tiles_of_their_own(text, rows, height):
    assert {config.tile_m for config in ranked(product(rows, outputs=4096, text=text))} == {height}


@pytest.mark.parametrize(
    ("text", "config", "words"),
    [
        ("uint4:g128", (128, 5, 1), "5 warpgroups; there can be 2, 3, 4"),
        ("uint4:g128", (64, 4, 1), "64 rows in a tile of 4 warpgroups"),
        ("uint4:g128", (16, 3, 1, 2), "2 of 3 warpgroups can't share outputs: no divisor"),
        ("uint4:g128", (64, 2, 1, 2), "can't share outputs of 64 rows of uint4:g128"),
        ("uint4:g128", (32, 4, 2, 4), "shared memory has no room for 2 tiles of x"),
        ("uint4:g128", (256, 3, 1), "256 rows in a tile of 3 warpgroups"),
        ("uint4:g128", (20, 2, 1), "multiple of 8, to 256"),
        ("uint4:g128", (136, 3, 1), "multiple of 8, to 128"),
        (
            "int8/int8",
            (40, 2, 1),
            "40 rows in a tile of 2 warpgroups; there can be a multiple of 16",
        ),
        ("float8:gK/float8", (256, 3, 1), None),  # tiles of two products
        ("float8:gK/float8", (144, 3, 1), "multiple of 32, to 256"),
        ("liquid4:g64/int8", (192, 3, 1), None),
        ("liquid4:g64/int8", (224, 3, 1), "multiple of 32, to 192"),
    ],
)
def test_a_reason_says_what_there_can_be(text, config, words):
    reason = why_unsound(WarpgroupConfig(*config), WeightFormat.parse(text))
    assert reason is None if words is None else words in reason
