from __future__ import annotations

import dataclasses
import json

import pytest

from mpjax.kernels import UnsupportedError
from mpjax.kernels.device import Limits
from mpjax.kernels.experts.plans import (
    OPERATION,
    ExpertsConfig,
    ExpertsWarpgroupConfig,
    Key,
    bucket,
    config_of,
    forced,
    plan_of,
    runs_by_warpgroups,
    warpgroup_config_of,
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
    assert OPERATION.key_of(qwen3(13)) == KEY
    tables.record(OPERATION, path, str(LIMITS.kind), {KEY: Entry(Plan("triton", CONFIG), 9.5)}, {})
    assert plan_of(qwen3(13)).config == CONFIG
    assert plan_of(qwen3(17)).config != CONFIG
    assert plan_of(dataclasses.replace(qwen3(13), gated=False)).config != CONFIG
    assert tables.read(OPERATION, path, str(LIMITS.kind)).entries == {
        KEY: Entry(Plan("triton", CONFIG), 9.5)
    }


def test_a_plan_that_does_not_fit_the_gpu_is_not_used(path):
    large = dataclasses.replace(CONFIG, tile_m=128, tile_n=128, stages=30)
    tables.record(OPERATION, path, str(LIMITS.kind), {KEY: Entry(Plan("triton", large), 9.5)}, {})
    assert plan_of(qwen3(16)).config != large


def test_plans_of_warpgroups(path):
    """Their tiles need not have a power of two rows; they are used where they can run."""
    problem = qwen3(4096)
    config = ExpertsWarpgroupConfig(96, 2, 1, tiling="counted")
    key, kind = OPERATION.key_of(problem), str(LIMITS.kind)
    tables.record(OPERATION, path, kind, {key: Entry(Plan("mosaic", config), 9.5)}, {})
    assert plan_of(problem).config == config
    uneven = dataclasses.replace(config, warpgroups=3)
    tables.record(OPERATION, path, kind, {key: Entry(Plan("mosaic", uneven), 9.5)}, {})
    assert plan_of(problem).config not in (config, uneven)


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


def test_a_damaged_table_is_named(path):
    path.write_text('{"device": "NVIDIA H200", "stamps": [], "experts": {"uint4:g128": {"x": {}}}}')
    tables.forget()
    assert tables.read(OPERATION, path, "NVIDIA H200").entries == {}
    path.write_text('{"device": "NVIDIA H200", "stamps": [], "experts": []}')
    with pytest.raises(TableError, match="expected an object"):
        tables.read(OPERATION, path, "NVIDIA H200")


def test_a_forced_plan_comes_before_the_rule():
    config = ExpertsConfig(16, 64, 1, 4, 3)
    with forced(Plan("triton", config)):
        assert config_of(qwen3(1)) == config
    assert config_of(qwen3(1)) == plan_of(qwen3(1)).config != config


def test_each_kernel_has_a_configuration_if_the_other_is_planned():
    few, many = qwen3(1), qwen3(4096)
    assert [plan_of(problem).implementation for problem in (few, many)] == ["triton", "mosaic"]
    assert isinstance(config_of(many), ExpertsConfig)
    assert isinstance(warpgroup_config_of(few), ExpertsWarpgroupConfig)
    with forced(Plan("mosaic", ExpertsWarpgroupConfig(64, 2, 1))):
        assert warpgroup_config_of(few) == ExpertsWarpgroupConfig(64, 2, 1)


def test_what_runs_by_warpgroups_on_this_device(pretend_gpu):
    assert [runs_by_warpgroups(qwen3(tokens)) for tokens in (64, 4096)] == [False, True]
    with forced(Plan("mosaic", ExpertsWarpgroupConfig(64, 2, 1))):  # which can't run
        assert not runs_by_warpgroups(qwen3(4096, outputs=1600))


def test_nothing_runs_by_warpgroups_without_a_gpu():
    assert not runs_by_warpgroups(qwen3(4096))


def test_there_is_no_configuration_for_what_a_gpu_lacks():
    old = Limits(108, 8.0, "NVIDIA A100")
    problem = dataclasses.replace(qwen3(1, "float8:gK/float8"), limits=old)
    with pytest.raises(UnsupportedError, match="can't multiply float8:gK/float8"):
        config_of(problem)
