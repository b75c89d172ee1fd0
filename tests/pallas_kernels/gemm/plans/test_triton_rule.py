from __future__ import annotations

import dataclasses

import pytest
from hypothesis import settings

from mpjax.kernels import UnsupportedError
from mpjax.kernels.device import Limits
from mpjax.kernels.gemm.plans.triton_rule import triton_by_rule
from tests.pallas_kernels.gemm.plans.problems import any_problem, assert_sound, product


def config_of(*arguments, **options):
    return triton_by_rule(product(*arguments, **options))


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
    config = config_of(rows, outputs=outputs)
    assert (config.tile_m, config.tile_n, config.warps) == sizes
    assert (config.scaling, config.stages) == (scaling, 3)


@pytest.mark.parametrize(
    ("text", "stages"),
    [("liquid4:g64/int8", 4), ("int8/int8", 4), ("float8:gK", 4), ("uint8:g128", 3)],
)
def test_what_has_no_scales_of_groups_is_loaded_further_ahead(text, stages):
    assert config_of(16, text=text).stages == stages


@pytest.mark.parametrize(("outputs", "stages"), [(24576, 2), (4096, 3)])
def test_weights_of_8_bits_share_multiprocessors_at_128_rows(outputs, stages):
    for text in ("uint8:g128", "float8:g128"):
        assert config_of(128, outputs=outputs, text=text).stages == stages


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
    config = config_of(128, channels, outputs)
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
    config = config_of(16, channels, outputs)
    assert (config.warps, config.splits) == (warps, splits)


def test_programs_are_made_smaller_where_multiprocessors_would_have_unlike_numbers():
    assert config_of(16, 2048, 13824).warps == 2  # 216 tiles


def test_large_tiles_are_split_where_rounds_would_be_left_half_empty():
    assert config_of(128, 8192, 10240).splits == 3  # 80 tiles
    assert config_of(256, 8192, 57344).splits == 1  # sums would cost more


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
    config = config_of(rows, channels, outputs)
    assert (config.tile_m, config.tile_n) == (128, 128)
    assert (config.splits, config.unsplit) == (splits, unsplit)
    assert -(-rows // 128) * (unsplit or 0) // 128 % 132 == 0


def test_symmetric_weights_are_scaled_as_they_are_decoded():
    for rows in (1, 32, 64, 256):
        expected = dataclasses.replace(config_of(rows), scaling="weight")
        assert config_of(rows, text="uint4:g128:sym") == expected


def test_a_block_of_mxfp4_is_one_product_of_four_warps():
    assert config_of(16, 2880, 4096, text="float4:g32").scaling == "weight"
    assert config_of(16, 2880, 4096, text="uint4:g32").scaling == "accumulator"


def test_small_products_are_split_and_large_ones_not():
    assert config_of(1, outputs=4096).splits > 1
    assert config_of(1, outputs=4096, limits=Limits(16, 9.0)).splits == 1
    assert config_of(256, outputs=57344).splits == 1


@pytest.mark.parametrize(
    ("rows", "outputs", "splits"), [(32, 6144, 4), (64, 4096, 4), (128, 4096, 2), (64, 24576, 1)]
)
def test_splits_have_one_length(rows, outputs, splits):
    assert config_of(rows, outputs=outputs).splits == splits  # of 16 blocks


def test_k_that_no_number_divides_is_split_all_the_same():
    assert config_of(1, 13 * 256, 4096).splits > 1


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
    config = config_of(rows, text=text)
    assert (config.tile_m, config.tile_n, config.warps, config.stages, config.width) == expected
