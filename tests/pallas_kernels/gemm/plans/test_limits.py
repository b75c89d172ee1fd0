"""What a GPU can run, its estimated time, and the candidates that are measured."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from hypothesis import settings

from mpjax.kernels import WeightFormat
from mpjax.kernels.device import Limits
from mpjax.kernels.gemm.plans.candidates import candidates
from mpjax.kernels.gemm.plans.configuration import TritonConfig, WarpgroupConfig
from mpjax.kernels.gemm.plans.cost_model import microseconds
from mpjax.kernels.gemm.plans.limits import (
    why_not_warpgroups,
    why_unsound,
)
from mpjax.kernels.gemm.plans.rule import plan_by_rule
from mpjax.kernels.gemm.plans.shared_memory import stages, triton_bytes, why_no_room
from mpjax.kernels.gemm.plans.warpgroup_rule import why_unsound as why_warpgroups_unsound
from mpjax.kernels.plans.plan import Plan
from tests.pallas_kernels.gemm.plans.problems import (
    EIGHT_BITS,
    any_problem,
    assert_sound,
    product,
)


@pytest.mark.parametrize(
    ("text", "capability", "config", "reason"),
    [
        ("uint4:g128", 9.0, TritonConfig(128, 128, 1, 8, 4), "bytes of shared memory"),
        ("uint4:g128", 8.9, TritonConfig(128, 128, 1, 8, 3), "bytes of shared memory"),
        # This compute capability is unknown, and taken to have what all have.
        ("uint4:g128", 12.0, TritonConfig(128, 128, 1, 8, 3), "there are 101376"),
        ("uint4:g32", 9.0, TritonConfig(256, 128, 1, 8, 2), "256 registers for sums"),
        ("uint4:gK", 9.0, TritonConfig(16, 64, 1, 2, 3, "weight"), "no scales that can be applied"),
        ("liquid4:g64/int8", 9.0, TritonConfig(16, 64, 1, 2, 3, "weight"), "no scales"),
        ("uint4:g128", 9.0, TritonConfig(16, 64, 1, 8, 3), "64 output channels are too few"),
        ("uint4:g128", 9.0, TritonConfig(16, 64, 2, 2, 3, unsplit=96), "no whole tiles of 64"),
        ("float8:gK/float8", 8.6, TritonConfig(16, 64, 1, 2, 3), "with compute capability 8.9"),
        ("uint4:g32", 9.0, TritonConfig(256, 128, 1, 8, 2, "weight"), None),
        ("uint4:g128", 9.0, TritonConfig(128, 128, 1, 8, 3), None),
        ("float8:gK/float8", 8.9, TritonConfig(16, 64, 1, 2, 3), None),
    ],
)
def test_unsound_configurations_are_refused(text, capability, config, reason):
    found = why_unsound(config, product(64, text=text, limits=Limits(132, capability)))
    assert (found is None) == (reason is None)
    assert (reason or "") in (found or "")


@pytest.mark.parametrize(
    ("text", "outputs", "capability", "reason"),
    [
        ("table4:g64", 128, 9.0, None),
        ("float8:g128/float8", 128, 9.0, "8-bit activations, and scales per group"),
        ("liquid4:g64/int8", 128, 9.0, None),
        ("int8/int8", 128, 9.0, None),
        ("uint4:g128", 100, 9.0, "100 output channels are no multiple of 64"),
        ("uint4:g128", 128, 8.9, "capability 8.9 has no `wgmma`"),
        ("uint4:g128", 128, 10.0, "capability 10.0 has no `wgmma`"),
        ("uint4:gK", 128, 9.0, None),
        ("float8:g128", 64, 9.0, None),
    ],
)
def test_what_warpgroups_can_not_multiply_has_a_reason(text, outputs, capability, reason):
    problem = product(64, outputs=outputs, text=text, limits=Limits(132, capability))
    found = why_not_warpgroups(problem)
    assert (found is None) == (reason is None)
    assert (reason or "") in (found or "")


@pytest.mark.parametrize(
    ("text", "config", "expected", "is_room"),
    [
        ("uint4:g128", WarpgroupConfig(256, 2, 1), (2, 4, 4), True),
        ("uint4:g128", WarpgroupConfig(64, 3, 1), (2, 8, 4), True),
        ("uint4:g128", WarpgroupConfig(2048, 2, 1), (2, 0, 4), False),
        ("uint4:g128", WarpgroupConfig(16, 2, 1), (8, 8, 1), True),
        ("uint4:g128", WarpgroupConfig(32, 2, 2, 2), (4, 4, 1), True),
        ("uint4:g128", WarpgroupConfig(32, 4, 2, 4), (1, 1, 1), False),
        ("int8/int8", WarpgroupConfig(256, 2, 1), (3, 3, 1), True),
        ("liquid4:g64/int8", WarpgroupConfig(256, 2, 1), (4, 4, 1), True),
        ("bfloat16", WarpgroupConfig(256, 2, 1), (3, 3, 1), True),
        ("liquid4:g64/int8", WarpgroupConfig(16, 3, 1), (8, 8, 1), True),
        ("uint4:g32", WarpgroupConfig(16, 2, 1), (8, 8, 1), True),
        ("uint4:g128", WarpgroupConfig(16, 3, 2), (4, 4, 1), True),
        # 64 KiB for the pairs of sixteen values, and 30 for those of eight
        ("table4:g64", WarpgroupConfig(16, 3, 1), (4, 4, 1), True),
        ("table4:g64", WarpgroupConfig(256, 2, 1), (2, 2, 4), False),
        ("table4:g64", WarpgroupConfig(128, 3, 1), (2, 4, 4), True),
        ("table3:g64", WarpgroupConfig(16, 3, 1), (3, 3, 1), True),
        ("table3:g64", WarpgroupConfig(256, 2, 1), (2, 4, 16), True),
    ],
)
def test_there_are_as_many_stages_as_there_is_room_for(text, config, expected, is_room):
    assert stages(WeightFormat.parse(text), config, jnp.dtype(jnp.float32))[:3] == expected
    assert (why_no_room(WeightFormat.parse(text), config) is None) == is_room


# The bytes that Triton asked for, as the compiler reported it for a GPU that had too little.
REQUESTED = [
    ("uint4:g128", 9.0, (16, 64, 1, 2, 3), 33792),
    ("uint4:g128", 9.0, (64, 64, 1, 4, 3), 115712),
    ("uint4:g128", 9.0, (128, 128, 1, 8, 3), 231424),
    ("uint4:g128", 8.0, (128, 128, 1, 8, 3), 165888),
    ("uint4:g128", 8.9, (128, 128, 1, 8, 2), 82944),
    ("uint4:g32", 9.0, (64, 64, 1, 4, 3), 59392),
    ("uint4:gK", 9.0, (128, 64, 1, 4, 2), 139264),
    ("uint8:g128", 9.0, (64, 128, 1, 8, 3), 82944),
    ("float8:gK", 9.0, (256, 64, 1, 4, 3), 212992),
    ("int8/int8", 9.0, (128, 128, 1, 8, 2), 65536),
    ("int8/int8", 8.0, (32, 128, 1, 8, 3), 40960),
]


@pytest.mark.parametrize(("text", "capability", "sizes", "requested"), REQUESTED)
def test_shared_memory_is_what_the_compiler_takes(text, capability, sizes, requested):
    limits = Limits(132, capability)
    assert triton_bytes(TritonConfig(*sizes), WeightFormat.parse(text), limits) == requested


PACKED, TABLE3, TABLE4 = "uint4:g128", "table3:g64", "table4:g64"
MATRIX, LEVELS = "int8/int8", "liquid4:g64/int8"


@pytest.mark.parametrize(
    ("text", "rows", "channels", "outputs", "config", "measured"),
    [
        (PACKED, 16, 12288, 4096, (16, 2, 2, 2), 11.0),
        (PACKED, 16, 4096, 24576, (16, 3, 1), 17.1),
        (PACKED, 32, 4096, 6144, (32, 2, 1, 2), 8.5),
        (PACKED, 64, 4096, 24576, (64, 3, 1), 25.0),
        (PACKED, 1024, 4096, 24576, (256, 2, 1), 250.4),
        (TABLE4, 16, 12288, 4096, (16, 3, 2, 3), 12.7),
        (TABLE4, 128, 4096, 24576, (128, 3, 1), 37.8),
        (TABLE3, 16, 4096, 24576, (16, 3, 1), 20.2),
        (TABLE3, 256, 4096, 24576, (128, 3, 1), 76.8),
        (MATRIX, 256, 12288, 4096, (64, 2, 1), 22.0),
        (MATRIX, 4096, 4096, 24576, (256, 2, 1), 558.5),
        (LEVELS, 64, 4096, 24576, (64, 3, 1), 20.9),
        (LEVELS, 256, 12288, 4096, (128, 3, 3), 27.4),
        (LEVELS, 4096, 4096, 24576, (256, 2, 1), 553.4),
    ],
)
def test_times_are_about_what_was_measured(text, rows, channels, outputs, config, measured):
    time = microseconds(WarpgroupConfig(*config), product(rows, channels, outputs, text))
    assert time == pytest.approx(measured, rel=0.15)


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
            assert why_warpgroups_unsound(plan.config, format) is None
            continue
        assert plan.implementation == "triton"
        assert plan.config is not None
        assert_sound(plan.config, problem)
        assert plan.config.tile_m <= max(8, 2 * problem.rows)


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


def test_fp8_has_one_where_the_gpu_has_no_fp8():
    problem = product(1, outputs=4096, text="float8:gK/float8", limits=Limits(84, 8.6))
    assert candidates(problem) == [Plan("dequantize")]
