from __future__ import annotations

import dataclasses

import pytest

from mpjax.kernels import UnsupportedError
from mpjax.kernels.device import Limits
from mpjax.kernels.experts.plans import (
    ExpertsConfig,
    ExpertsWarpgroupConfig,
    config_of,
    forced,
    plan_of,
    runs_by_warpgroups,
    warpgroup_config_of,
)
from mpjax.kernels.plans.plan import Plan
from tests.pallas_kernels.experts.plans.problems import qwen3


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
