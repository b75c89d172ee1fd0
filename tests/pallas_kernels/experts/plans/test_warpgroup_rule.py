from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mpjax.kernels.device import Limits
from mpjax.kernels.experts.plans import ExpertsWarpgroupConfig, why_not_warpgroups
from mpjax.kernels.experts.plans.warpgroup_rule import (
    HEIGHTS,
    expected_tiles,
    ranked,
    suits_warpgroups,
    why_unsound,
)
from tests.pallas_kernels.experts.plans.problems import qwen3

MIXTRAL = {"experts": 8, "per_token": 2, "channels": 4096, "outputs": 28672}


def test_tiles_are_as_many_as_random_tokens_take(rng):
    problem = qwen3(1000, **MIXTRAL)
    draws = rng.random((400, 1000, 8)).argsort(-1)[..., :2]
    counts = (draws[..., None] == np.arange(8)).sum((1, 2))  # [draws, experts]
    for rows in HEIGHTS:
        found = expected_tiles(problem, rows)
        assert found == pytest.approx(np.ceil(counts / rows).sum(-1).mean(), rel=0.02)
    assert expected_tiles(qwen3(1, experts=8, per_token=8), 64) == pytest.approx(8)


def test_heights_follow_the_tokens_of_an_expert():
    heights = [ranked(qwen3(tokens, **MIXTRAL))[0].tile_m for tokens in (64, 256, 1024)]
    assert heights == sorted(heights)
    assert heights[1] in (64, 80, 96)  # for 64 tokens of an expert on average
    assert ranked(qwen3(256, **MIXTRAL), "counted")[0].tiling == "counted"


def test_four_consumers_share_low_tiles():
    """They read x half as often as two. Plain weights and 8-bit ones are not decoded to 16 bits."""
    assert ranked(qwen3(256, **MIXTRAL))[0].warpgroups == 4
    config, few = ExpertsWarpgroupConfig(96, 4, 1), ExpertsWarpgroupConfig(112, 4, 1)
    assert why_unsound(config, qwen3(256)) is None
    assert "a multiple of 8, to 96" in (why_unsound(few, qwen3(256)) or "")
    for text in ("bfloat16", "int8/int8", "liquid4:g64/int8"):
        assert "to 32" in (why_unsound(config, qwen3(256, text)) or "")


def test_few_tokens_are_left_to_triton():
    assert [suits_warpgroups(qwen3(tokens, **MIXTRAL)) for tokens in (16, 128, 129)] == [
        *(False, False, True)
    ]
    assert [suits_warpgroups(qwen3(tokens)) for tokens in (64, 512, 1024)] == [False, False, True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": "bfloat16", "channels": 2080}, "2080 input channels of plain weights"),
        ({"outputs": 1600}, "1600 output channels are no multiple of 128"),
        ({"outputs": 800, "gated": False}, "800 output channels are no multiple of 64"),
        ({"limits": Limits(108, 8.0, "NVIDIA A100")}, "has no `wgmma`"),
    ],
)
def test_problems_of_other_kernels(changes, message):
    assert message in (why_not_warpgroups(qwen3(4096, **changes)) or "")


@pytest.mark.parametrize("text", ["float4:g32", "bfloat16"])
def test_experts_of_gpt_oss_suit_as_they_are_published(text):
    """Neither of their sizes is a multiple of 128."""
    shape = {"per_token": 4, "experts": 32, "channels": 2880}
    for outputs, gated in ((5760, True), (2880, False)):
        problem = qwen3(1024, text, **shape, outputs=outputs, gated=gated)
        assert why_not_warpgroups(problem) is None
        assert suits_warpgroups(problem)
        assert 128 <= ranked(problem)[0].tile_m <= 160  # for 128 tokens of an expert on average


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((64, 2, 2), "2 splits and 1 shares"),
        ((64, 2, 1, 2), "1 splits and 2 shares"),
        ((64, 3, 1), "3 warpgroups can't divide gate and up"),
        ((136, 3, 1), "136 rows in a tile of 3 warpgroups"),
        ((256, 2, 1), "shared memory has no room"),
    ],
)
def test_configurations_that_can_not_run(fields, message):
    gated = fields != (136, 3, 1)
    problem = dataclasses.replace(qwen3(4096), gated=gated)
    assert message in (why_unsound(ExpertsWarpgroupConfig(*fields), problem) or "")
