from __future__ import annotations

import dataclasses

import pytest

from mpjax.kernels.device import Limits
from mpjax.kernels.experts.plans import candidates, plan_by_rule
from mpjax.kernels.experts.plans.operation import OPERATION
from mpjax.kernels.plans.names import require_values
from mpjax.kernels.plans.plan import Plan
from tests.pallas_kernels.experts.plans.problems import qwen3


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


def test_tilings_that_are_tried_depend_on_the_pairs():
    def tilings(tokens):
        return {plan.config.tiling for plan in candidates(qwen3(tokens), 10000)}

    assert tilings(1) == {"pairs"}
    assert tilings(16) == {"pairs", "counted", "sorted"}
    assert tilings(64) == {"counted", "sorted"}
    assert tilings(4096) == {"sorted"}


def test_a_product_that_routes_has_whole_sums():
    """Others have splits, too: those of more tokens, and the second product."""

    def splits(problem):
        return {plan.config.splits for plan in candidates(problem, 10000)}

    assert splits(qwen3(1)) == {1}
    assert splits(qwen3(64)) == splits(qwen3(1, gated=False)) == {1, 2, 4, 8}


def test_plans_of_a_table_can_be_written():
    problem = qwen3(16)
    for plan in candidates(problem):
        fields = dataclasses.asdict(plan.config).items()
        require_values(type(plan.config), {name: x for name, x in fields if x is not None})
        assert OPERATION.why_damaged(OPERATION.key_of(problem), plan) is None


def test_a_gpu_without_the_format_has_the_reference_alone():
    old = Limits(108, 8.0, "NVIDIA A100")
    problem = dataclasses.replace(qwen3(1, "float8:gK/float8"), limits=old)
    assert candidates(problem) == [Plan("reference")]
