from __future__ import annotations

import dataclasses

import pytest

from mpjax.kernels.experts.plans import (
    TABLES,
    ExpertsConfig,
    ExpertsWarpgroupConfig,
    Key,
    bucket,
    plan_of,
)
from mpjax.kernels.plans import tables
from mpjax.kernels.plans.plan import Entry, Plan
from mpjax.kernels.plans.tables import TableError
from tests.pallas_kernels.experts.plans.problems import LIMITS, qwen3

CONFIG = ExpertsConfig(16, 64, 2, 4, 3, "weight", tiling="counted")
KEY = Key("uint4:g128", 8, 128, 2048, 1536, True, 16)


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv(tables.VARIABLE, str(tmp_path))
    return tmp_path / tables.file_name(str(LIMITS.kind))


def test_a_measured_plan_is_found_again(path):
    assert TABLES.key_of(qwen3(13)) == KEY
    TABLES.record(path, str(LIMITS.kind), {KEY: Entry(Plan("triton", CONFIG), 9.5)}, {})
    assert plan_of(qwen3(13)).config == CONFIG
    assert plan_of(qwen3(17)).config != CONFIG
    assert plan_of(dataclasses.replace(qwen3(13), gated=False)).config != CONFIG
    assert TABLES.read(path, str(LIMITS.kind)).entries == {KEY: Entry(Plan("triton", CONFIG), 9.5)}


def test_a_plan_that_does_not_fit_the_gpu_is_not_used(path):
    large = dataclasses.replace(CONFIG, tile_m=128, tile_n=128, stages=30)
    TABLES.record(path, str(LIMITS.kind), {KEY: Entry(Plan("triton", large), 9.5)}, {})
    assert plan_of(qwen3(16)).config != large


def test_plans_of_warpgroups(path):
    """Their tiles need not have a power of two rows; they are used where they can run."""
    problem = qwen3(4096)
    config = ExpertsWarpgroupConfig(96, 2, 1, tiling="counted")
    key, kind = TABLES.key_of(problem), str(LIMITS.kind)
    TABLES.record(path, kind, {key: Entry(Plan("mosaic", config), 9.5)}, {})
    assert plan_of(problem).config == config
    uneven = dataclasses.replace(config, warpgroups=3)
    TABLES.record(path, kind, {key: Entry(Plan("mosaic", uneven), 9.5)}, {})
    assert plan_of(problem).config not in (config, uneven)


def test_names():
    for key in (KEY, KEY._replace(gated=False, tokens=1)):
        assert TABLES.key(TABLES.names(key)) == key
    assert TABLES.names(KEY) == ("uint4:g128", "8/128 of 2048x1536 gated", "16")
    assert [bucket(tokens) for tokens in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("uint4", "8/128 of 2048x1536", "16"), "the format is written uint4:gK"),
        (("uint4:g128", "2048x1536", "16"), "'2048x1536' is no shape such as"),
        (("uint4:g128", "8/128 of 2048x1536", "17"), "tokens must be a power of two"),
    ],
)
def test_names_that_are_no_keys(names, message):
    with pytest.raises(ValueError, match=message):
        TABLES.key(names)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tiling": "none"}, "tiling is 'none', expected one of"),
        ({"tile_m": 24}, "tile_m is 24, expected a power of two"),
        ({"stages": 0}, "stages is 0, expected a positive integer"),
    ],
)
def test_configurations_that_no_kernel_has(fields, message):
    with pytest.raises(ValueError, match=message):
        TABLES.check(KEY, "triton", fields)


def test_warpgroups_have_no_tile_for_each_pair():
    with pytest.raises(ValueError, match=r"tiling is 'pairs', expected one of \('counted', 'so"):
        TABLES.check(KEY, "mosaic", {"tile_m": 96, "tiling": "pairs"})


def test_a_damaged_table_is_named(path):
    path.write_text('{"device": "NVIDIA H200", "stamps": [], "experts": {"uint4:g128": {"x": {}}}}')
    tables.forget()
    assert TABLES.read(path, "NVIDIA H200").entries == {}
    path.write_text('{"device": "NVIDIA H200", "stamps": [], "experts": []}')
    with pytest.raises(TableError, match="expected an object"):
        TABLES.read(path, "NVIDIA H200")
