"""The rules that plan attention where no table has a plan."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import settings

from mpjax.kernels.attention.plans.configuration import AttentionConfig, why_unsound
from mpjax.kernels.attention.plans.register_rule import registers_by_rule
from mpjax.kernels.attention.plans.rule import config_by_rule
from mpjax.kernels.attention.plans.split_rule import (
    Tile,
    largest_tile,
    split_by_rule,
)
from mpjax.kernels.device import Limits
from tests.pallas_kernels.attention.plans.problems import any_problem, problem


def assert_sound(problem):
    config = config_by_rule(problem)
    assert why_unsound(config, problem) is None, config
    # The bytes that a program has in all, whatever is reserved for what.
    ahead = (config.stages - 1) * config.tile_keys * problem.token_bytes
    if problem.residual:
        waiting = 2 * 2 * problem.cache.head_dim * config.residual_keys
        ahead = max(ahead, (config.stages - 1) * waiting)
    queries = 2 * config.tile_rows * problem.cache.head_dim
    # With wide heads the weights cross it, too: 10,240 bytes with 64 rows, as Triton compiles them.
    has_weights = problem.cache.head_dim > 128 and config.tile_rows > 8
    crossing = 160 * config.tile_rows if has_weights else 0
    assert ahead + queries + crossing <= problem.limits.shared_memory
    assert config.splits <= max(1, problem.tiles(config.tile_keys))


@settings(max_examples=300)
@any_problem
def test_it_is_sound_for_any_problem(problem):
    assert_sound(problem)


@pytest.mark.parametrize(
    ("text", "sizes", "rows", "expected"),
    [
        ("KV8", "8x32768", "4x128", "8x128 4 4 3 255 balanced"),
        ("KV4", "8x32768", "4x128", "8x128 8 2 3 255 balanced"),
        ("KV2", "8x32768", "4x128", "8x128 16 1 3 16/1 255 balanced in one loop"),
        ("K4cV4c", "8x32768", "4x128", "8x128 12 2 3 32/1 168 balanced"),
        ("KV8", "256x4096", "4x128", "8x128 1 4 2 None"),
        ("KV8", "256x4224", "4x128", "8x128 1 4 2 168 balanced"),  # one may be long: programs help
        ("KV8", "256x4224", "16x128", "16x128 1 4 2 168 balanced"),
        ("KV8", "8x8064", "4x128", "8x128 4 4 3 255"),  # four programs for each sequence
        ("KV8", "8x8192", "4x128", "8x128 4 4 3 255 balanced"),
        ("KV8", "1x524288", "4x128", "8x128 64 4 2 None"),
        ("KV16", "64x65536", "4x128", "8x128 1 4 3 255 balanced"),
        ("KV4c", "64x65536", "4x128", "8x128 1 2 3 32/1 168 balanced"),
        ("KV2", "64x65536", "4x128", "8x128 2 1 3 16/1 255 balanced in one loop"),
        ("KV2", "1x32768", "4x128", "8x128 130 1 2 16/2 224"),  # the residual takes from brief ones
        ("KV2", "8x2048", "4x128", "8x64 14 1 3 16/2 224"),
        ("KV2", "16x4096", "4x128", "8x128 6 1 2 16/2 224"),
        ("KV2", "32x1024", "4x128", "8x128 2 1 2 16/2 224"),
        ("KV2", "32x4096", "4x128", "8x128 4 1 3 16/2 224"),
        ("KV2", "1x4096", "4x128", "8x64 60 1 3 16/4 224"),
        ("KV2", "1x131072", "4x128", "8x128 130 1 3 16/2 224"),
        ("KV4c", "1x4096", "4x128", "8x128 31 2 3 32/1 192"),
        ("KV4c", "1x131072", "4x128", "8x128 99 2 3 32/1 192"),
        ("K8V2", "1x256", "4x128", "8x64 1 1 3 16/4 255"),  # nothing is packed
        ("K8V4c", "1x512", "4x128", "8x128 3 2 3 32/4 255"),
        ("KV2", "128x2048", "4x128", "8x128 1 1 3 16/0 255"),
        ("KV2", "512x128", "4x128", "8x128 1 1 3 16/0 255"),
        ("KV4c", "64x2048", "4x128", "8x128 1 2 3 32/0 255"),
        ("K8V4c", "128x2048", "4x128", "8x128 1 2 2 32/0 None"),
        ("KV2t", "128x8192", "4x128", "8x128 1 1 3 16/0 255 balanced"),
        ("KV4c", "128x8192", "4x128", "8x128 1 2 3 32/1 168 balanced"),
        ("KV2", "32x2048", "4x128", "8x128 2 1 2 16/2 224"),
        ("KV2", "1x128", "4x128", "8x64 1 1 3 16/4 224"),
        ("K4cV4c", "32x4096", "4x128", "8x128 3 2 3 32/1 192"),
        ("KV4c", "32x4096", "4x128", "8x128 3 2 3 32/1 192"),
        ("KV4c", "32x1024", "4x128", "8x128 2 2 2 32/1 168"),
        ("KV4c", "32x8192", "4x256", "8x128 1 4 3 32/1 192 balanced"),
        ("KV2", "32x8192", "4x128", "8x128 4 1 3 16/1 255 balanced in one loop"),
        ("KV4c", "32x4096", "4x64", "8x128 4 1 3 32/1 224"),
        ("K4cV8", "32x4096", "4x64", "8x128 4 2 3 32/1 192"),
        ("KV2", "32x4096", "4x256", "8x128 3 2 3 16/2 224"),
        ("KV4c", "32x4096", "2048x128", "64x128 1 4 3 32/1 None"),
        ("KV16", "1x4096", "4x128", "8x64 16 2 3 255"),
        ("KV4", "32x4096", "4x128", "8x128 2 2 3 255"),
        ("KV4", "128x4096", "4x128", "8x64 1 2 3 None"),  # the assembler chooses registers
        ("KV8", "128x4096", "4x128", "8x128 1 4 2 None"),
        ("KV4", "128x8192", "4x128", "8x128 1 2 3 168 balanced"),  # which may help
        ("K8V4", "128x8192", "4x128", "8x128 1 2 2 168 balanced"),
        ("KV16", "512x4096", "4x128", "8x128 1 4 3 255"),
        ("K8V4c", "64x1024", "4x128", "8x128 1 2 2 32/0 255"),
        ("KV4", "1x4096", "4x128", "8x64 64 2 3 255"),
        ("KV4", "8x4096", "4x128", "8x64 8 2 3 255"),
        ("KV4", "5x4096", "4x128", "8x64 13 2 3 255"),  # 3.9 programs for each multiprocessor
        ("KV4", "32x1024", "4x128", "8x128 1 2 3 255"),
        ("KV4", "128x2048", "4x128", "8x64 1 2 3 None"),  # all at once, but not with tiles of 128
        ("KV8", "1x32768", "4x128", "8x64 32 4 3 255"),
        ("KV8", "8x4096", "4x128", "8x64 4 4 3 255"),
        ("KV8", "128x2048", "4x128", "8x128 1 4 2 None"),  # not all at once with either
        ("KV8", "1x4096", "4x128", "8x128 32 4 3 255"),  # a tile each, which four warps share
        ("KV4c", "1x2048", "4x128", "8x64 30 2 3 16/2 192"),  # 15 would leave multiprocessors idle
        ("KV16", "1x1024", "4x128", "8x64 16 2 3 255"),
        ("KV16", "32x1024", "4x128", "8x64 1 2 3 255"),
        ("KV16", "8x16384", "4x128", "8x128 2 4 3 255 balanced"),
        ("K8V4", "1x3072", "4x128", "8x64 32 2 3 255"),
        ("KV16", "1x2176", "4x128", "8x64 16 2 3 255"),
    ],
)
def test_what_the_rule_plans(text, sizes, rows, expected):
    """Mostly what was the fastest on an H200 with 8 KV heads.

    sizes: sequences and their tokens. rows: for each KV head, and the heads' dimension.
    expected: rows and keys of a tile, splits, warps, stages, the residual's keys and splits,
    registers, and whether programs help each other.
    """
    (batch, tokens), (rows, head_dim) = (map(int, text.split("x")) for text in (sizes, rows))
    one = problem(text, batch, rows, tokens, (8, head_dim))
    config = config_by_rule(one)
    words = [f"{config.tile_rows}x{config.tile_keys}", config.splits, config.warps, config.stages]
    if one.residual:
        words.append(f"{config.residual_keys}/{config.residual_splits}")
    words += [config.registers, *["balanced"] * config.is_balanced]
    words += ["in one loop"] * config.has_one_loop
    assert " ".join(map(str, words)) == expected
    assert not config_by_rule(dataclasses.replace(one, is_varlen=True)).is_balanced


@pytest.mark.parametrize(
    ("capability", "splits", "stages", "registers"),
    [(9.0, 1, 3, 255), (9.0, 16, 3, 255), (9.0, 33, 3, None), (8.9, 33, 3, 255), (8.9, 66, 2, 255)],
)
def test_programs_beside_each_other(capability, splits, stages, registers):
    """All that there are, or as many as shared memory holds the tiles of, but for 32 KiB.

    Tiles have 32 KiB: an H200 has room for six of them, an L40S for two.
    """
    one = problem("KV8", 1, tokens=131072, limits=Limits(66, capability))
    config = AttentionConfig(8, 128, splits, 4, stages)
    assert registers_by_rule(one, config) == registers
    assert registers_by_rule(one, dataclasses.replace(config, tile_rows=32)) is None


@pytest.mark.parametrize(
    ("text", "rows", "head_dim", "tile"),
    [
        ("KV16", 4, 128, Tile(8, 128, 4)),
        ("KV4", 4, 128, Tile(8, 128, 2)),
        ("KV2", 4, 64, Tile(8, 128, 1)),
        ("KV16", 4, 256, Tile(8, 64, 4)),
        ("KV16", 2048, 128, Tile(128, 128, 8)),
        ("KV8", 2048, 128, Tile(64, 128, 4)),
        ("KV8", 2048, 256, Tile(64, 64, 8)),
        ("KV4cg32", 2048, 128, Tile(64, 32, 4)),
    ],
)
def test_the_largest_tile(text, rows, head_dim, tile):
    assert largest_tile(problem(text, rows=rows, heads=(8, head_dim))) == tile


@pytest.mark.parametrize(("rows", "splits"), [(4, 32), (1024, 2), (16384, 1)])
def test_varlen_sequences_have_the_programs_of_one_that_has_all_rows(rows, splits):
    one, many = (problem("KV8", batch, rows=rows, tokens=32896) for batch in (1, 32))
    many = dataclasses.replace(many, is_varlen=True)
    assert split_by_rule(many) == split_by_rule(one)
    assert split_by_rule(many).splits == splits
