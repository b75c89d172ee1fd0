from __future__ import annotations

import pytest

from mpjax.kernels import WeightFormat
from mpjax.kernels.device import Limits
from mpjax.kernels.gemm.plans.configuration import TritonConfig
from mpjax.kernels.gemm.plans.limits import (
    why_no_wgmma,
    why_not_triton,
    why_not_warpgroups,
    why_unsound,
    widths,
)
from tests.pallas_kernels.gemm.plans.problems import H200, WITHOUT_WGMMA, product


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


def test_wgmma_is_hoppers_alone():
    assert why_no_wgmma(H200) is None
    assert "capability 10.0 has no `wgmma`" in (why_no_wgmma(WITHOUT_WGMMA) or "")


@pytest.mark.parametrize(("text", "can"), [("float8:gK/float8", False), ("float8:gK", True)])
def test_triton_multiplies_fp8_where_the_gpu_does(text, can):
    assert (why_not_triton(product(1, text=text, limits=Limits(84, 8.6))) is None) == can
    assert why_not_triton(product(1, text=text)) is None


@pytest.mark.parametrize(
    ("text", "expected"), [("uint4:g128", (None, 32)), ("uint4:g32", (None,)), ("int8", (None, 64))]
)
def test_half_a_step_is_a_choice_where_rows_stay_long(text, expected):
    assert widths(WeightFormat.parse(text)) == expected
