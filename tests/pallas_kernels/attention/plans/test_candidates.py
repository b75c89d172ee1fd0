from __future__ import annotations

import pytest
from hypothesis import settings

from mpjax.kernels.attention import shapes
from mpjax.kernels.attention.plans.candidates import candidates
from mpjax.kernels.attention.plans.configuration import why_unsound
from mpjax.kernels.attention.plans.operation import OPERATION
from mpjax.kernels.attention.plans.rule import plan_by_rule
from tests.pallas_kernels.attention.plans.problems import FORMATS, any_problem, problem


@settings(max_examples=15)
@any_problem
def test_they_are_sound_for_any_problem(problem):
    plans = candidates(problem)
    assert plans[0] == plan_by_rule(problem)
    assert len(set(plans)) == len(plans) <= 24
    for plan in plans:
        assert plan.implementation == "triton"
        assert why_unsound(plan.config, problem) is None
        assert OPERATION.suits(problem, plan)


@pytest.mark.parametrize("shape", shapes.DECODE[1:4], ids=lambda shape: shape.name)
def test_there_is_enough_to_search_for_named_shapes(shape):
    heads = shape.kv_heads, shape.head_dim
    for text in FORMATS[::3]:
        group = shape.query_heads // shape.kv_heads
        configs = [c.config for c in candidates(problem(text, shape.batch, group, 4096, heads))]
        assert len(configs) == 24
        for name in ("splits", "warps", "stages"):
            assert len({getattr(config, name) for config in configs}) > 1, (text, name)


def test_fewer_are_the_nearest():
    assert candidates(problem(), most=5) == candidates(problem())[:5]


def test_the_residual_has_other_numbers_of_programs():
    configs = [plan.config for plan in candidates(problem("KV2"))]
    assert len({config.residual_splits for config in configs}) > 1
    assert len({config.registers for config in candidates_of("KV8")}) > 1


def candidates_of(text):
    return [plan.config for plan in candidates(problem(text))]
