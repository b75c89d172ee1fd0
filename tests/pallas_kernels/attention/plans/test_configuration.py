from __future__ import annotations

import dataclasses

import pytest

from mpjax.kernels.attention.plans.configuration import (
    AttentionConfig,
    tile_memory,
    why_not_config,
    why_unsound,
)
from mpjax.kernels.device import Limits
from tests.pallas_kernels.attention.plans.problems import H200, problem

CONFIG = AttentionConfig(8, 64, 4, 2, 3)


def test_programs_of_packed_keys_and_of_the_residual():
    config = dataclasses.replace(CONFIG, residual_splits=2, registers=168, is_balanced=True)
    assert config.programs == 6
    assert str(config) == "8x64, 4 + 2 splits, 2 warps, 3 stages, 168 registers, balanced"
    assert str(CONFIG) == "8x64, 4 splits, 2 warps, 3 stages"


def test_shared_memory_of_tiles():
    assert tile_memory(problem(), 8) == (227 - 32) * 1024
    assert tile_memory(problem(limits=Limits(142, 8.9)), 8) == (99 - 32) * 1024
    assert tile_memory(problem(heads=(8, 256)), 64) == (227 - 32 - 12) * 1024


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"tile_rows": 4}, "tile_rows is 4, expected a power of two from 8 to 128"),
        ({"tile_keys": 96}, "tile_keys is 96"),
        ({"residual_keys": 8}, "residual_keys is 8"),
        ({"warps": 16}, "warps is 16"),
        ({"registers": 256}, "registers is 256, expected 24 to 255"),
        ({"has_one_loop": True}, "has_one_loop is true"),
    ],
)
def test_configurations_that_no_problem_can_have(changes, reason):
    found = why_not_config(dataclasses.replace(CONFIG, **changes))
    assert found == reason if reason is None else found.startswith(reason)


@pytest.mark.parametrize(
    ("options", "changes", "reason"),
    [
        ({}, {}, None),
        ({}, {"warps": 3}, "warps is 3"),
        ({}, {"tile_rows": 16}, "tiles of 16 rows for 4"),
        ({"text": "KV4cg32"}, {}, "tiles of 64 keys, where 32 share their channels' scales"),
        ({"tokens": 128}, {}, "4 programs for 2 tiles of keys"),
        ({}, {"residual_splits": 1}, "there is no residual to read"),
        ({"text": "KV2"}, {}, "programs that share packed keys leave the residual to others"),
        ({"text": "KV2"}, {"splits": 1}, None),
        ({"text": "KV2"}, {"residual_splits": 4}, None),
        ({"text": "KV2"}, {"residual_splits": 17}, "17 programs for 16 tiles of the residual"),
        ({"is_varlen": True}, {"is_balanced": True}, "programs can't help each other"),
        ({"rows": 128}, {"tile_rows": 128}, "256 registers for sums; there is room for 128"),
        ({}, {"stages": 14}, "212992 bytes of shared memory for tiles; there are 199680"),
    ],
)
def test_what_a_problem_can_run_with(options, changes, reason):
    found = why_unsound(dataclasses.replace(CONFIG, **changes), problem(**options))
    assert found == reason if reason is None else found.startswith(reason)


def test_smaller_gpus_have_room_for_less():
    config = AttentionConfig(8, 128, 1, 4, 3)
    assert why_unsound(config, problem("KV16", limits=H200)) is None
    reason = why_unsound(config, problem("KV16", limits=Limits(142, 8.9)))
    assert reason == "131072 bytes of shared memory for tiles; there are 68608"


def test_tiles_of_the_residual_need_room_too():
    config = dataclasses.replace(CONFIG, residual_splits=1, residual_keys=128, stages=4)
    reason = why_unsound(config, problem("KV2"))
    assert reason == "196608 bytes of shared memory for tiles; there are 199680" or reason is None
    assert "bytes" in (why_unsound(dataclasses.replace(config, stages=5), problem("KV2")) or "")
