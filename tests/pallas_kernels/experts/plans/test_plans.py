"""Plans of grouped products."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from mpjax.kernels.device import Limits
from mpjax.kernels.experts.plans import (
    OPERATION,
    ExpertsConfig,
    ExpertsWarpgroupConfig,
    Key,
    bucket,
    forced,
    plan_by_rule,
    plan_of,
    runs_by_warpgroups,
    warpgroup_rule,
    why_not_warpgroups,
)
from mpjax.kernels.experts.plans.candidates import candidates
from mpjax.kernels.experts.plans.rule import config_by_rule, tiling_of
from mpjax.kernels.experts.plans.warpgroup_rule import (
    HEIGHTS,
    expected_tiles,
    ranked,
    suits_warpgroups,
)
from mpjax.kernels.experts.plans.warpgroup_rule import (
    why_unsound as why_warpgroups_unsound,
)
from mpjax.kernels.gemm.plans import why_unsound
from mpjax.kernels.plans import tables
from mpjax.kernels.plans.plan import Entry, Plan
from mpjax.kernels.plans.tables import TableError
from tests.pallas_kernels.experts.plans.problems import LIMITS, qwen3
from tests.pallas_kernels.oracles import ALL_FORMATS


@pytest.mark.parametrize("text", ["uint4:g128", "float4:g32", "float8:g128/float8", "bfloat16"])
def test_plans_are_sound_and_the_rules_is_first(text):
    for tokens in (1, 64, 4096):
        problem = qwen3(tokens, text)
        plans = candidates(problem, 30)
        assert plans[0] == plan_by_rule(problem)
        assert len(set(plans)) == len(plans) == 30
        assert all(OPERATION.suits(problem, plan) for plan in plans)
        triton = [plan.config for plan in plans if plan.implementation == "triton"]
        assert all(config.tile_n >= 16 * config.warps for config in triton)
        has_two_kernels = tokens == 4096 and "float8" not in text
        assert 10 <= len(triton) < 30 if has_two_kernels else len(triton) == 30


def test_a_gpu_without_the_format_has_the_reference_alone():
    old = Limits(108, 8.0, "NVIDIA A100")
    problem = dataclasses.replace(qwen3(1, "float8:gK/float8"), limits=old)
    assert candidates(problem) == [Plan("reference")]


CONFIG = ExpertsConfig(16, 64, 2, 4, 3, "weight", tiling="counted")
KEY = Key("uint4:g128", 8, 128, 2048, 1536, True, 16)


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv(tables.VARIABLE, str(tmp_path))
    return tmp_path / tables.file_name(str(LIMITS.kind))


def test_a_measured_plan_is_found_again(path):
    assert OPERATION.key_of(qwen3(13)) == KEY
    tables.record(OPERATION, path, str(LIMITS.kind), {KEY: Entry(Plan("triton", CONFIG), 9.5)}, {})
    assert plan_of(qwen3(13)).config == CONFIG
    assert plan_of(qwen3(17)).config != CONFIG
    assert plan_of(dataclasses.replace(qwen3(13), gated=False)).config != CONFIG
    assert tables.read(OPERATION, path, str(LIMITS.kind)).entries == {
        KEY: Entry(Plan("triton", CONFIG), 9.5)
    }


def test_names():
    for key in (KEY, KEY._replace(gated=False, tokens=1)):
        assert OPERATION.key(OPERATION.names_of(key)) == key
    assert OPERATION.names_of(KEY) == ("uint4:g128", "8/128 of 2048x1536 gated", "16")
    assert [bucket(tokens) for tokens in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("uint4", "8/128 of 2048x1536", "16"), "in a table this is uint4:gK 8/128"),
        (("uint4:g128", "2048x1536", "16"), "'2048x1536' is not of the form 'per_token/experts of"),
        (("uint4:g128", "8/128 of 2048x1536", "17"), "in a table this is .* 2048x1536 32"),
    ],
)
def test_names_that_are_no_keys(names, message):
    with pytest.raises(ValueError, match=message):
        OPERATION.key(names)


@pytest.mark.parametrize(
    ("implementation", "fields", "message"),
    [
        ("triton", {"tiling": "none"}, "tiling is 'none', expected one of"),
        ("triton", {"tile_m": 24}, "tile_m is 24, expected a power of two"),
        ("triton", {"stages": 0}, "stages is 0, expected a positive integer"),
        ("mosaic", {"tiling": "pairs"}, r"tiling is 'pairs', expected one of \('counted', 'so"),
    ],
)
def test_configurations_that_no_kernel_has(implementation, fields, message, path):
    config = CONFIG if implementation == "triton" else ExpertsWarpgroupConfig(96, 2, 1)
    entries = {KEY: Entry(Plan(implementation, config), 9.5)}
    tables.record(OPERATION, path, str(LIMITS.kind), entries, {})
    content = json.loads(path.read_text())
    content["experts"]["uint4:g128"]["8/128 of 2048x1536 gated"]["16"].update(fields)
    path.write_text(json.dumps(content))
    with pytest.raises(TableError, match=message):
        tables.read(OPERATION, path, str(LIMITS.kind))


def test_what_runs_by_warpgroups_on_this_device(pretend_gpu):
    assert [runs_by_warpgroups(qwen3(tokens)) for tokens in (64, 4096)] == [False, True]
    with forced(Plan("mosaic", ExpertsWarpgroupConfig(64, 2, 1))):  # which can't run
        assert not runs_by_warpgroups(qwen3(4096, outputs=1600))


def test_experts_that_are_hit():
    # E · (1 − (1 − k / E)^tokens)
    assert [qwen3(tokens).hit for tokens in (1, 4, 16, 64, 256)] == [8, 29, 82, 126, 128]
    assert qwen3(3, experts=8, per_token=8).hit == 8


def test_the_product_has_the_outputs_of_all_tiles():
    product = qwen3(16).product(8)
    assert (product.rows, product.channels, product.outputs) == (8, 2048, 82 * 1536)
    assert qwen3(4096).product(128).outputs == 256 * 1536


def test_a_part_of_the_experts_has_its_part_of_the_tokens():
    """A device of four plans the tiles that one device with all experts has for each of them."""
    for tokens in (16, 512, 4096):
        whole, part = qwen3(tokens), qwen3(tokens, held_experts=32)
        assert (part.own_pairs, part.pairs) == (whole.pairs // 4, whole.pairs)
        assert part.hit == pytest.approx(whole.hit / 4, abs=1)
        assert config_by_rule(part).tile_m == config_by_rule(whole).tile_m
        assert suits_warpgroups(part) == suits_warpgroups(whole)
        assert expected_tiles(part, 64) == pytest.approx(expected_tiles(whole, 64) / 4)
        assert OPERATION.key_of(part) == OPERATION.key_of(whole)


def test_tiles_have_room_for_an_experts_tokens():
    rows = {tokens: config_by_rule(qwen3(tokens)).tile_m for tokens in (1, 64, 256, 1024, 8192)}
    assert rows == {1: 8, 64: 8, 256: 32, 1024: 128, 8192: 128}


def test_how_tiles_are_found():
    found = {tokens: tiling_of(qwen3(tokens)) for tokens in (1, 4, 5, 512, 513)}
    assert found == {1: "pairs", 4: "pairs", 5: "counted", 512: "counted", 513: "sorted"}
    few = {"experts": 8, "per_token": 2}  # each pair is compared with as many
    found = {tokens: tiling_of(qwen3(tokens, **few)) for tokens in (2, 32768, 32769)}
    assert found == {2: "counted", 32768: "counted", 32769: "sorted"}


@pytest.mark.parametrize("text", ALL_FORMATS)
def test_every_format_has_a_sound_configuration(text):
    for tokens in (1, 16, 4096):
        problem = qwen3(tokens, text)
        plan = plan_by_rule(problem)
        if plan.implementation == "mosaic":
            assert tokens == 4096
            assert warpgroup_rule.why_unsound(plan.config, problem) is None
            plan = plan_by_rule(problem, warpgroups=False)
        assert plan.implementation == "triton"
        if problem.format.weight.is_packed:
            assert why_unsound(plan.config, problem.product(plan.config.tile_m)) is None
        else:
            assert plan.config.tile_n >= 16 * plan.config.warps


MIXTRAL = {"experts": 8, "per_token": 2, "channels": 4096, "outputs": 28672}


def test_tiles_are_as_many_as_random_tokens_take(rng):
    problem = qwen3(1000, **MIXTRAL)
    draws = rng.random((400, 1000, 8)).argsort(-1)[..., :2]
    counts = (draws[..., None] == np.arange(8)).sum((1, 2))  # [draws, experts]
    for rows in HEIGHTS:
        found = expected_tiles(problem, rows)
        assert found == pytest.approx(np.ceil(counts / rows).sum(-1).mean(), rel=0.02)
    assert expected_tiles(qwen3(1, experts=8, per_token=8), 64) == pytest.approx(8)


def test_four_consumers_share_low_tiles():
    """They read x half as often as two. Plain weights and 8-bit ones are not decoded to 16 bits."""
    assert ranked(qwen3(256, **MIXTRAL))[0].warpgroups == 4
    config, few = ExpertsWarpgroupConfig(96, 4, 1), ExpertsWarpgroupConfig(112, 4, 1)
    assert why_warpgroups_unsound(config, qwen3(256)) is None
    assert "a multiple of 8, to 96" in (why_warpgroups_unsound(few, qwen3(256)) or "")
    for text in ("bfloat16", "int8/int8", "liquid4:g64/int8"):
        assert "to 32" in (why_warpgroups_unsound(config, qwen3(256, text)) or "")


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
    assert message in (why_warpgroups_unsound(ExpertsWarpgroupConfig(*fields), problem) or "")
