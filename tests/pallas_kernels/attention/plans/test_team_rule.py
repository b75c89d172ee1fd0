from __future__ import annotations

import dataclasses

import pytest

from mpjax.kernels.attention.plans.team_rule import (
    MOST_SPLITS,
    Tile,
    largest_tile,
    power_below,
    team_by_rule,
)
from mpjax.kernels.device import Limits
from tests.pallas_kernels.attention.plans.problems import problem


@pytest.mark.parametrize(
    ("text", "batch", "tokens", "keys", "splits"),
    [
        ("KV4", 1, 4096, 64, 64),
        ("KV4", 8, 4096, 64, 8),
        ("KV4", 5, 4096, 64, 13),  # 3.9 programs for each multiprocessor
        ("KV4", 32, 1024, 128, 1),
        ("KV4", 128, 2048, 64, 1),  # all at once, which they would not be with tiles of 128
        ("KV4", 128, 4096, 64, 1),
        ("KV4", 128, 8192, 128, 1),
        ("KV8", 1, 32768, 64, 32),
        ("KV8", 8, 4096, 64, 4),
        ("KV8", 128, 2048, 128, 1),  # not all at once with either
        ("KV8", 16, 1024, 128, 1),
        ("KV8", 8, 2048, 64, 4),
        ("KV8", 1, 4096, 128, 32),  # one tile each, which four warps share
        ("KV4c", 32, 4096, 128, 3),
        ("KV4c", 1, 4096, 128, 31),  # one tile each
        ("KV4c", 1, 2048, 64, 30),  # 15 would leave multiprocessors idle
        ("KV4c", 1, 8192, 128, 63),
        ("KV2", 1, 131072, 128, 130),
        ("KV16", 1, 1024, 64, 16),
        ("KV16", 1, 4096, 64, 16),
        ("KV16", 32, 1024, 64, 1),
        ("KV16", 8, 16384, 128, 2),
        ("K8V4", 1, 3072, 64, 32),
        ("KV16", 1, 2176, 64, 16),
    ],
)
def test_sequences_are_shared_as_was_measured_to_be_fastest(text, batch, tokens, keys, splits):
    """Measured on an H200, with 8 KV heads."""
    team = team_by_rule(problem(text, batch, tokens=tokens))
    assert (team.tile.keys, team.splits) == (keys, splits)


@pytest.mark.parametrize(
    ("text", "narrow", "most"),
    [
        ("KV16", 16, 16),
        ("KV8", 16, 32),
        ("KV4", 16, 32),
        ("K8V2", 16, 32),
        ("KV2t", 16, 32),
        ("KV4c", 8, 16),
        ("K4cV8", 8, 16),
        ("KV2", 8, 32),
        ("K2V4", 8, 32),
    ],
)
def test_few_rows_are_read_in_narrow_tiles(text, narrow, most):
    """As was measured to be fastest on an H200."""
    for rows in (9, 16, 17, 24, 32, 33):
        wide = min(64, 1 << (rows - 1).bit_length())
        tile = largest_tile(problem(text, rows=rows))
        assert tile.rows == (narrow if rows <= most else wide)
        assert tile.is_narrow == (rows <= most)


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


def test_a_tile_fits_the_shared_memory():
    small = Limits(142, 8.9)
    wide = problem("KV16", rows=2048, heads=(8, 256))
    assert largest_tile(wide).keys == 64
    assert largest_tile(dataclasses.replace(wide, limits=small)).keys == 32


def test_a_small_page_has_small_tiles():
    shape = problem("KV8", 1, tokens=131072)
    shape = dataclasses.replace(shape, cache=dataclasses.replace(shape.cache, page_size=16))
    assert largest_tile(shape).keys == 64


def test_more_multiprocessors_have_more_programs():
    few, many = (
        team_by_rule(problem("KV4", 1, tokens=131072, limits=Limits(count, 9.0))).splits
        for count in (66, 132)
    )
    assert 2 * few - 1 <= many <= 2 * few + 1


def test_less_shared_memory_has_fewer_programs():
    large, small = (
        team_by_rule(problem("KV4c", 1, tokens=131072, limits=Limits(132, capability)))
        for capability in (9.0, 8.9)
    )
    assert (large.resident, small.resident) == (6, 2)


def test_one_long_sequence_is_shared_and_a_large_batch_is_not():
    assert team_by_rule(problem("KV8", 1, tokens=131072)).splits > 4
    assert team_by_rule(problem("KV8", 256, tokens=8192)).splits == 1
    assert team_by_rule(problem("KV2t", 1, tokens=1 << 21, heads=(1, 128))).splits == MOST_SPLITS


@pytest.mark.parametrize(("rows", "splits"), [(4, 32), (1024, 2), (16384, 1)])
def test_varlen_sequences_have_the_programs_of_one_that_has_all_rows(rows, splits):
    one, many = (problem("KV8", batch, rows=rows, tokens=32896) for batch in (1, 32))
    many = dataclasses.replace(many, is_varlen=True)
    assert team_by_rule(many) == team_by_rule(one)
    assert team_by_rule(many).splits == splits


def test_one_sequence_that_nobody_helps_has_more_programs():
    assert team_by_rule(problem("KV8", 1, tokens=524288)).splits == 64


def test_powers_of_two():
    assert [power_below(number) for number in (1, 2, 3, 4, 7, 8)] == [1, 2, 2, 4, 4, 8]
