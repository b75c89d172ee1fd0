from __future__ import annotations

import dataclasses

import pytest

from mpjax.kernels.device import Limits
from mpjax.kernels.experts.plans import plan_by_rule, warpgroup_rule
from mpjax.kernels.experts.plans.rule import config_by_rule, tiling_of
from mpjax.kernels.gemm.plans import triton_by_rule, why_unsound
from tests.pallas_kernels.experts.plans.problems import qwen3
from tests.pallas_kernels.oracles import ALL_FORMATS


def test_tiles_have_room_for_an_experts_tokens():
    rows = {tokens: config_by_rule(qwen3(tokens)).tile_m for tokens in (1, 64, 256, 1024, 8192)}
    assert rows == {1: 8, 64: 8, 256: 32, 1024: 128, 8192: 128}


def test_a_gate_is_in_the_kernel_if_tiles_fill_the_gpu():
    assert config_by_rule(qwen3(1)).splits == 1
    assert config_by_rule(qwen3(1, gated=False)).splits > 1
    assert config_by_rule(qwen3(1, outputs=256)).splits > 1


def test_tiles_of_several_rounds_are_whole():
    mixtral = {"experts": 8, "per_token": 2, "channels": 14336, "outputs": 4096, "gated": False}
    for tokens in (4096, 8192):
        problem = qwen3(tokens, **mixtral)
        assert triton_by_rule(problem.product(128)).unsplit is not None
        assert config_by_rule(problem).splits == 1
    assert config_by_rule(qwen3(1, **mixtral)).splits > 1


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


def test_what_a_gpu_can_not_multiply_is_left_to_the_reference():
    old = Limits(108, 8.0, "NVIDIA A100")
    problem = dataclasses.replace(qwen3(1, "float8:gK/float8"), limits=old)
    assert plan_by_rule(problem).implementation == "reference"
