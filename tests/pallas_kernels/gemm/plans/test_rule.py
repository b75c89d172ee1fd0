from __future__ import annotations

import pytest
from hypothesis import settings

from mpjax.kernels.device import Limits
from mpjax.kernels.gemm.plans.limits import why_not_warpgroups
from mpjax.kernels.gemm.plans.rule import plan_by_rule
from mpjax.kernels.gemm.plans.triton_rule import triton_by_rule
from mpjax.kernels.gemm.plans.warpgroup_rule import warpgroups_by_rule
from mpjax.kernels.plans.plan import Plan
from tests.pallas_kernels.gemm.plans.problems import (
    EIGHT_BITS,
    H200,
    WITHOUT_WGMMA,
    any_problem,
    assert_sound,
    product,
)


def chosen(*arguments, **options):
    """The implementation of a product."""
    return plan_by_rule(product(*arguments, **options)).implementation


@settings(max_examples=200)
@any_problem
def test_plans_are_sound_for_any_problem(problem):
    plan = plan_by_rule(problem)
    if plan.implementation == "mosaic":
        assert plan.config == warpgroups_by_rule(problem)
        assert why_not_warpgroups(problem) is None
        return
    assert (plan.config is None) == (plan.implementation != "triton")
    if plan.implementation == "xla":
        assert str(problem.format) in EIGHT_BITS
    if problem.weight.operand == "float8" and problem.limits.compute_capability < 8.9:
        assert plan == Plan("dequantize")
        return
    config = triton_by_rule(problem)
    assert plan.config in (None, config)
    assert_sound(config, problem)


@pytest.mark.parametrize(
    ("text", "outputs", "limits"),
    [
        ("float8:g128/float8", 4096, H200),
        ("uint4:g128", 4100, H200),
        ("uint4:g128", 4096, Limits(108, 8.0)),
        ("uint4:g128", 4096, WITHOUT_WGMMA),
        ("table4:g64", 4096, WITHOUT_WGMMA),
    ],
)
def test_what_warpgroups_can_not_multiply_is_left_to_others(text, outputs, limits):
    assert chosen(64, outputs=outputs, text=text, limits=limits) == "triton"


@pytest.mark.parametrize(
    ("text", "most"),
    [
        *((text, "dequantize") for text in ("uint4:g32", "uint8:g32:sym", "float8:gK")),
        *((text, "mosaic") for text in ("uint4:g64", "uint4:g128:sym", "uint4:gK")),
    ],
)
def test_warpgroups_multiply_many_rows_on_hopper(text, most):
    found = [chosen(rows, text=text) for rows in (31, 33, 4096, 4097)]
    assert found == ["triton", "mosaic", "mosaic", most]


@pytest.mark.parametrize("rows", [8, 16, 24, 32])
def test_of_few_rows_warpgroups_multiply_four_bits_and_tables(rows):
    for text, name in (
        *(("uint4:g128", "mosaic"), ("uint4:gK:sym", "mosaic"), ("uint8", "triton")),
        *(("table4:g64", "mosaic"), ("table3:g128", "mosaic"), ("table2:g32", "mosaic")),
    ):
        assert chosen(rows, text=text) == name
        of_fewer = "mosaic" if rows == 8 and text.startswith("table") else "triton"
        assert chosen(rows - 1, text=text) == of_fewer


def test_mxfp4_is_left_to_triton():
    """Warpgroups multiply it if they are asked to."""
    assert chosen(64, text="float4:g32") == "triton"
    assert why_not_warpgroups(product(64, text="float4:g32")) is None


def test_without_warpgroups_the_rule_has_another_kernel():
    problem = product(64)
    assert plan_by_rule(problem).implementation == "mosaic"
    assert plan_by_rule(problem, warpgroups=False) == Plan("triton", triton_by_rule(problem))


def test_many_rows_are_not_fused():
    shape = {"outputs": 4096}
    without = {**shape, "limits": WITHOUT_WGMMA}
    assert plan_by_rule(product(257, **without)) == Plan("dequantize")
    table = "table4:g64"
    assert chosen(128, text=table, **without) == "triton"
    assert plan_by_rule(product(129, text=table, **without)) == Plan("dequantize")
    assert chosen(2048, text=table, **shape) == "mosaic"
    assert plan_by_rule(product(2049, text=table, **shape)) == Plan("dequantize")
    float8 = "float8:gK/float8"
    assert chosen(32, text=float8, **shape) == "triton"
    assert plan_by_rule(product(33, text=float8, **without)) == Plan("xla")


@pytest.mark.parametrize("text", ["int8/int8", "float8:gK/float8", "liquid4:g64/int8"])
def test_warpgroups_multiply_eight_bits(text):
    found = [chosen(rows, text=text) for rows in (32, 33, 4096, 50_000)]
    assert found == ["triton", "mosaic", "mosaic", "mosaic"]


def test_integer_products_are_fused():
    assert chosen(8192, text="int8/int8", limits=WITHOUT_WGMMA) == "triton"
    for limits, outputs in ((WITHOUT_WGMMA, 24576), (H200, 24570)):
        options = {"outputs": outputs, "text": "liquid4:g64/int8", "limits": limits}
        assert chosen(2048, **options) == "triton"
        assert plan_by_rule(product(2049, **options)) == Plan("dequantize")
