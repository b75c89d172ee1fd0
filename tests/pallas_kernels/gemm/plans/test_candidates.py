from __future__ import annotations

import pytest
from hypothesis import settings

from mpjax.kernels.device import Limits
from mpjax.kernels.gemm import shapes
from mpjax.kernels.gemm.plans.candidates import candidates
from mpjax.kernels.gemm.plans.configuration import TritonConfig, WarpgroupConfig
from mpjax.kernels.gemm.plans.rule import plan_by_rule
from mpjax.kernels.gemm.plans.triton_rule import triton_by_rule
from mpjax.kernels.gemm.plans.warpgroup_rule import why_unsound
from mpjax.kernels.plans.plan import Plan
from tests.pallas_kernels.gemm.plans.problems import (
    EIGHT_BITS,
    FORMATS,
    H200,
    any_problem,
    assert_sound,
    product,
)


@settings(max_examples=40)
@any_problem
def test_they_are_sound_for_any_problem(problem):
    plans, format = candidates(problem), problem.weight
    assert len(set(plans)) == len(plans) <= 40
    assert plan_by_rule(problem) in plans
    assert plans[-1].implementation == ("xla" if str(format) in EIGHT_BITS else "dequantize") or (
        format.operand == "float8" and problem.limits.compute_capability < 8.9
    )
    for plan in plans[:-1]:
        if isinstance(plan.config, WarpgroupConfig):
            assert why_unsound(plan.config, format) is None
            continue
        assert plan.implementation == "triton"
        assert plan.config is not None
        assert_sound(plan.config, problem)
        assert plan.config.tile_m <= max(8, 2 * problem.rows)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("shape", [shapes.QWEN3_8B[1], shapes.LLAMA3_70B[2]], ids=lambda s: s.name)
def test_there_is_enough_to_search_for_named_shapes(shape):
    for text in FORMATS:
        for rows in (16, 128, 1024):
            plans = candidates(product(rows, shape.channels, shape.outputs, text))
            assert len(plans) >= 15, f"{text}, {rows} rows"


def test_they_begin_with_the_rule_and_what_is_near_to_it():
    for limits in (H200, Limits(132, 8.0)):
        problem = product(64, limits=limits)
        plans = candidates(problem)
        assert plans[0] == plan_by_rule(problem)
        fused = [plan for plan in plans if plan.implementation == "triton"]
        assert fused[0] == Plan("triton", triton_by_rule(problem))
        few = candidates(problem, most=5)
        assert len(few) == 5
        assert few[0] == plans[0]
        assert few[-1] == plans[-1] == Plan("dequantize")


def test_a_third_of_them_is_for_warpgroups():
    plans = candidates(product(128, outputs=4096), most=20)
    names = [plan.implementation for plan in plans]
    assert names == ["mosaic"] * 6 + ["triton"] * 13 + ["dequantize"]
    few = candidates(product(15, outputs=4096), most=20)
    assert [plan.implementation for plan in few] == [
        *["triton"] * 13,
        *["mosaic"] * 6,
        "dequantize",
    ]
    assert len({str(plan) for plan in few}) == 20
    names = [plan.implementation for plan in candidates(product(7, outputs=4096))]
    assert "mosaic" not in names


def test_tables_of_less_than_eight_rows_are_tuned_for_warpgroups():
    plans = candidates(product(7, outputs=4096, text="table4:g64"))
    assert plans[0].implementation == "mosaic"


def test_what_the_rule_splits_is_split_in_other_ways():
    configs = [plan.config for plan in candidates(product(128))]
    configs = [config for config in configs if isinstance(config, TritonConfig)]
    assert {config.unsplit for config in configs} == {None, 16896}
    assert len({config.splits for config in configs if config.unsplit}) > 1


def test_fp8_has_one_where_the_gpu_has_no_fp8():
    problem = product(1, outputs=4096, text="float8:gK/float8", limits=Limits(84, 8.6))
    assert candidates(problem) == [Plan("dequantize")]
