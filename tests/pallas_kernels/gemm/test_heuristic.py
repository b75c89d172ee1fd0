from __future__ import annotations

import dataclasses

import pytest
from hypothesis import settings

from mpjax.kernels import WeightFormat
from mpjax.kernels.device import Limits
from mpjax.kernels.gemm.config import GemmConfig, Plan
from mpjax.kernels.gemm.heuristic import fused_config, heuristic
from mpjax.kernels.gemm.limits import why_not_warpgroups
from mpjax.kernels.gemm.warpgroups import warpgroup_config
from tests.pallas_kernels.gemm.plans import EIGHT_BITS, H200, PACKED, any_product, assert_sound

WITHOUT_WGMMA = Limits(132, 10.0)


@settings(max_examples=200)
@any_product
def test_heuristics_are_sound_for_any_product(rows, text, groups, outputs, limits):
    format, channels = WeightFormat.parse(text), groups * 256
    plan = heuristic(rows, format, channels, outputs, limits)
    if plan.implementation == "mosaic":
        assert plan.config == warpgroup_config(rows, format, channels, outputs, limits)
        assert why_not_warpgroups(format, outputs, limits) is None
        return
    assert (plan.config is None) == (plan.implementation != "triton")
    if plan.implementation == "xla":
        assert text in EIGHT_BITS
    if "/float8" in text and limits.compute_capability < 8.9:
        assert plan == Plan("dequantize")
        return
    config = fused_config(rows, format, channels, outputs, limits)
    assert plan.config in (None, config)
    assert_sound(config, format, channels, limits)
    assert config.tile_m <= max(8, 2 * rows), "the rows of a tile are mostly padding"


@pytest.mark.parametrize(
    ("rows", "outputs", "sizes", "scaling"),
    [
        (1, 24576, (8, 64, 4), "accumulator"),
        (16, 24576, (16, 64, 4), "accumulator"),
        (16, 4096, (16, 64, 4), "accumulator"),
        (32, 24576, (32, 64, 4), "accumulator"),
        (64, 24576, (64, 64, 4), "weight"),
        (128, 6144, (128, 64, 4), "weight"),
        (128, 24576, (128, 128, 8), "weight"),
        (256, 24576, (128, 128, 8), "weight"),
        (256, 4096, (128, 64, 4), "weight"),  # too few tiles for the largest
    ],
)
def test_the_rule_at_named_numbers_of_rows(rows, outputs, sizes, scaling):
    config = heuristic(rows, PACKED, 4096, outputs, WITHOUT_WGMMA).config
    assert isinstance(config, GemmConfig)
    assert (config.tile_m, config.tile_n, config.warps) == sizes
    assert (config.scaling, config.stages) == (scaling, 3)


@pytest.mark.parametrize(
    ("text", "stages"),
    [("liquid4:g64/int8", 4), ("int8/int8", 4), ("float8:gK", 4), ("uint8:g128", 3)],
)
def test_what_has_no_scales_of_groups_is_loaded_further_ahead(text, stages):
    assert fused_config(16, WeightFormat.parse(text), 4096, 24576, H200).stages == stages


@pytest.mark.parametrize(("outputs", "stages"), [(24576, 2), (4096, 3)])
def test_weights_of_8_bits_share_multiprocessors_at_128_rows(outputs, stages):
    for text in ("uint8:g128", "float8:g128"):
        assert fused_config(128, WeightFormat.parse(text), 4096, outputs, H200).stages == stages


@pytest.mark.parametrize(
    ("channels", "outputs", "sizes", "splits"),
    [
        (12288, 4096, (128, 128, 8), 4),
        (8192, 57344, (128, 128, 8), 2),
        (8192, 10240, (128, 128, 8), 3),  # 240 programs in two rounds of a third of K
        (8192, 8192, (128, 64, 4), 1),  # whose partial sums would cost more
        (4096, 4096, (128, 64, 4), 2),  # hardly begun before they end
    ],
)
def test_the_largest_tile_serves_fewer_rows_where_they_have_many_steps(
    channels, outputs, sizes, splits
):
    config = fused_config(128, PACKED, channels, outputs, H200)
    assert (config.tile_m, config.tile_n, config.warps) == sizes
    assert config.splits == splits


@pytest.mark.parametrize(
    ("channels", "outputs", "warps", "splits"),
    [
        (8192, 10240, 2, 3),  # 480 programs
        (8192, 8192, 2, 4),
        (4096, 6144, 4, 4),  # 384
        (4096, 24576, 4, 1),
    ],
)
def test_many_programs_have_two_warps(channels, outputs, warps, splits):
    config = fused_config(16, PACKED, channels, outputs, H200)
    assert (config.warps, config.splits) == (warps, splits)


def test_programs_are_made_smaller_where_multiprocessors_would_have_unlike_numbers():
    assert fused_config(16, PACKED, 2048, 13824, H200).warps == 2  # 216 tiles


def test_large_tiles_are_split_where_rounds_would_be_left_half_empty():
    assert fused_config(128, PACKED, 8192, 10240, H200).splits == 3  # 80 tiles
    assert fused_config(256, PACKED, 8192, 57344, H200).splits == 1  # sums would cost more


@pytest.mark.parametrize(
    ("rows", "channels", "outputs", "splits", "unsplit"),
    [
        (256, 8192, 10240, 4, 8448),  # 28 of 160 tiles are left over
        (128, 8192, 57344, 2, 50688),  # 52 of 448
        (128, 4096, 24576, 2, 16896),  # 60 of 192
        (256, 5120, 13824, 1, None),  # 84 of 216: as many programs of half of K need two rounds
        (128, 8192, 10240, 3, None),  # there is no whole round
    ],
)
def test_large_tiles_that_whole_rounds_leave_over_are_split(
    rows, channels, outputs, splits, unsplit
):
    config = fused_config(rows, PACKED, channels, outputs, H200)
    assert (config.tile_m, config.tile_n) == (128, 128)
    assert (config.splits, config.unsplit) == (splits, unsplit)
    assert -(-rows // 128) * (unsplit or 0) // 128 % 132 == 0


def test_symmetric_weights_are_scaled_as_they_are_decoded():
    symmetric = WeightFormat.parse("uint4:g128:sym")
    for rows in (1, 32, 64, 256):
        config = fused_config(rows, symmetric, 4096, 24576, H200)
        other = fused_config(rows, PACKED, 4096, 24576, H200)
        assert config == dataclasses.replace(other, scaling="weight")


def test_small_products_are_split_and_large_ones_not():
    assert fused_config(1, PACKED, 4096, 4096, H200).splits > 1
    assert fused_config(1, PACKED, 4096, 4096, Limits(16, 9.0)).splits == 1
    assert fused_config(256, PACKED, 4096, 57344, H200).splits == 1


@pytest.mark.parametrize(
    ("rows", "outputs", "splits"), [(32, 6144, 4), (64, 4096, 4), (128, 4096, 2), (64, 24576, 1)]
)
def test_splits_have_one_length(rows, outputs, splits):
    assert fused_config(rows, PACKED, 4096, outputs, H200).splits == splits  # of 16 blocks


def test_k_that_no_number_divides_is_split_all_the_same():
    assert fused_config(1, PACKED, 13 * 256, 4096, H200).splits > 1


@pytest.mark.parametrize(
    ("text", "outputs", "limits"),
    [
        ("float8:g128/float8", 4096, H200),
        ("uint4:g128", 4100, H200),
        ("uint4:g128", 4096, Limits(108, 8.0)),
        ("uint4:g128", 4096, WITHOUT_WGMMA),
        ("table4:g64", 4096, WITHOUT_WGMMA),
    ],
)
def test_what_warpgroups_can_not_multiply_is_left_to_others(text, outputs, limits):
    plan = heuristic(64, WeightFormat.parse(text), 4096, outputs, limits)
    assert plan.implementation == "triton"


@pytest.mark.parametrize(
    ("text", "most"),
    [
        *((text, "dequantize") for text in ("uint4:g32", "uint8:g32:sym", "float8:gK")),
        *((text, "mosaic") for text in ("uint4:g64", "uint4:g128:sym", "uint4:gK")),
    ],
)
def test_warpgroups_multiply_many_rows_on_hopper(text, most):
    format = WeightFormat.parse(text)
    found = [heuristic(rows, format, 4096, 24576, H200) for rows in (31, 33, 4096, 4097)]
    assert [plan.implementation for plan in found] == ["triton", "mosaic", "mosaic", most]


@pytest.mark.parametrize("rows", [8, 16, 24, 32])
def test_of_few_rows_warpgroups_multiply_four_bits_and_tables(rows):
    for text, name in (
        *(("uint4:g128", "mosaic"), ("uint4:gK:sym", "mosaic"), ("uint8", "triton")),
        *(("table4:g64", "mosaic"), ("table3:g128", "mosaic"), ("table2:g32", "mosaic")),
    ):
        format = WeightFormat.parse(text)
        assert heuristic(rows, format, 4096, 24576, H200).implementation == name
        found = heuristic(rows - 1, format, 4096, 24576, H200).implementation
        assert found == ("mosaic" if rows == 8 and text.startswith("table") else "triton")


def test_many_rows_are_not_fused():
    assert heuristic(257, PACKED, 4096, 4096, WITHOUT_WGMMA) == Plan("dequantize")
    table = WeightFormat.parse("table4:g64")
    assert heuristic(128, table, 4096, 4096, WITHOUT_WGMMA).implementation == "triton"
    assert heuristic(129, table, 4096, 4096, WITHOUT_WGMMA) == Plan("dequantize")
    assert heuristic(2048, table, 4096, 4096, H200).implementation == "mosaic"
    assert heuristic(2049, table, 4096, 4096, H200) == Plan("dequantize")
    float8 = WeightFormat.parse("float8:gK/float8")
    assert heuristic(32, float8, 4096, 4096, H200).implementation == "triton"
    assert heuristic(33, float8, 4096, 4096, WITHOUT_WGMMA) == Plan("xla")


@pytest.mark.parametrize("text", ["int8/int8", "float8:gK/float8", "liquid4:g64/int8"])
def test_warpgroups_multiply_eight_bits(text):
    format = WeightFormat.parse(text)
    found = [heuristic(rows, format, 4096, 24576, H200) for rows in (32, 33, 4096, 50_000)]
    assert [plan.implementation for plan in found] == ["triton", "mosaic", "mosaic", "mosaic"]


def test_integer_products_are_fused():
    plain, of_levels = (WeightFormat.parse(text) for text in ("int8/int8", "liquid4:g64/int8"))
    assert heuristic(8192, plain, 4096, 24576, WITHOUT_WGMMA).implementation == "triton"
    for limits, outputs in ((WITHOUT_WGMMA, 24576), (H200, 24570)):
        assert heuristic(2048, of_levels, 4096, outputs, limits).implementation == "triton"
        assert heuristic(2049, of_levels, 4096, outputs, limits) == Plan("dequantize")


@pytest.mark.parametrize(
    ("text", "rows", "expected"),
    [
        ("table4:g64", 32, (32, 64, 4, 2, None)),
        ("table4:g64", 33, (64, 64, 4, 2, 32)),
        ("table4:g64", 65, (64, 128, 4, 2, 32)),
        ("table3:g64", 32, (32, 64, 4, 2, None)),
        ("table3:g64", 65, (64, 64, 4, 3, None)),  # a wider tile would spill
    ],
)
def test_tables_in_shared_memory_have_wider_tiles(text, rows, expected):
    config = fused_config(rows, WeightFormat.parse(text), 4096, 24576, Limits(132, 9.0))
    assert (config.tile_m, config.tile_n, config.warps, config.stages, config.width) == expected
