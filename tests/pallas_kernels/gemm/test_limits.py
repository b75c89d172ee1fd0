from __future__ import annotations

import pytest

from mpjax.kernels import WeightFormat
from mpjax.kernels.gemm.config import GemmConfig
from mpjax.kernels.gemm.limits import (
    Limits,
    shared_memory,
    why_not_warpgroups,
    why_unsound,
)

# What Triton asked for, as the compiler reported it for a GPU that had too little.
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
    assert shared_memory(GemmConfig(*sizes), WeightFormat.parse(text), limits) == requested


@pytest.mark.parametrize(
    ("text", "capability", "config", "reason"),
    [
        ("uint4:g128", 9.0, GemmConfig(128, 128, 1, 8, 4), "bytes of shared memory"),
        ("uint4:g128", 8.9, GemmConfig(128, 128, 1, 8, 3), "bytes of shared memory"),
        ("uint4:g128", 12.0, GemmConfig(128, 128, 1, 8, 3), "there are 101376"),  # not in the table
        ("uint4:g32", 9.0, GemmConfig(256, 128, 1, 8, 2), "256 registers for sums"),
        ("uint4:gK", 9.0, GemmConfig(16, 64, 1, 2, 3, "weight"), "no scales that can be applied"),
        ("liquid4:g64/int8", 9.0, GemmConfig(16, 64, 1, 2, 3, "weight"), "no scales"),
        ("uint4:g128", 9.0, GemmConfig(16, 64, 1, 8, 3), "64 output channels are too few"),
        ("uint4:g128", 9.0, GemmConfig(16, 64, 2, 2, 3, unsplit=96), "no whole tiles of 64"),
        ("float8:gK/float8", 8.6, GemmConfig(16, 64, 1, 2, 3), "came with compute capability 8.9"),
        ("uint4:g32", 9.0, GemmConfig(256, 128, 1, 8, 2, "weight"), None),
        ("uint4:g128", 9.0, GemmConfig(128, 128, 1, 8, 3), None),
        ("float8:gK/float8", 8.9, GemmConfig(16, 64, 1, 2, 3), None),
    ],
)
def test_unsound_configurations_are_refused(text, capability, config, reason):
    found = why_unsound(config, WeightFormat.parse(text), Limits(132, capability))
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
    limits = Limits(132, capability)
    found = why_not_warpgroups(WeightFormat.parse(text), outputs, limits)
    assert (found is None) == (reason is None)
    assert (reason or "") in (found or "")
