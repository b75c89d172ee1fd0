from __future__ import annotations

import dataclasses

import pytest

from mpjax.kernels.attention.plans.configuration import AttentionConfig
from mpjax.kernels.attention.plans.register_rule import registers_by_rule
from mpjax.kernels.attention.plans.rule import config_by_rule
from mpjax.kernels.device import Limits
from tests.pallas_kernels.attention.plans.problems import problem


@pytest.mark.parametrize(
    ("text", "head_dim", "rows", "tokens", "registers"),
    [
        ("K4cV4c", 128, 4, 4096, 192),
        ("KV4c", 128, 4, 4096, 192),
        ("KV4c", 128, 4, 1024, 168),
        ("KV4c", 128, 4, 8192, 168),
        ("KV4c", 256, 4, 8192, 192),
        ("KV2", 128, 4, 4096, 224),
        ("KV2", 128, 4, 8192, 255),
        ("KV4c", 64, 4, 4096, 224),
        ("K4cV8", 64, 4, 4096, 192),
        ("KV2", 128, 4, 1024, 224),
        ("KV2", 256, 4, 4096, 224),
        ("KV4c", 128, 2048, 4096, None),
    ],
)
def test_registers_of_steps_of_channels(text, head_dim, rows, tokens, registers):
    """Two warps with keys of four bits get registers for six programs, if brief or balanced.

    Balanced programs with keys of two bits get all registers. Other programs get more than a sixth,
    and K4cV8's more than an eighth, which would be too few.
    """
    config = config_by_rule(problem(text, 32, rows, tokens, (8, head_dim)))
    assert config.registers == registers


@pytest.mark.parametrize(
    ("text", "batch", "tokens", "registers"),
    [
        ("KV16", 1, 4096, 255),
        ("KV4", 32, 4096, 255),
        ("KV4", 128, 4096, None),
        ("KV8", 128, 4096, None),
        ("KV4", 128, 8192, 168),  # which may help
        ("KV8", 128, 8192, 168),
        ("KV8", 8, 32768, 255),
        ("K8V4", 128, 8192, 168),
        ("KV16", 512, 4096, 255),  # shared memory holds the tiles of one
        ("K8V4c", 64, 1024, 255),  # four, and as many of the residual, which are brief
    ],
)
def test_registers_of_programs_that_come_beside_each_other(text, batch, tokens, registers):
    """The assembler decides for eight programs of two warps (KV4) and six of four warps (KV8).

    For balanced programs, it would choose more than the programs beside them leave.
    """
    assert config_by_rule(problem(text, batch, tokens=tokens)).registers == registers


@pytest.mark.parametrize(
    ("capability", "splits", "stages", "registers"),
    [(9.0, 1, 3, 255), (9.0, 16, 3, 255), (9.0, 33, 3, None), (8.9, 33, 3, 255), (8.9, 66, 2, 255)],
)
def test_programs_beside_each_other(capability, splits, stages, registers):
    """All that there are, or as many as shared memory holds the tiles of, but for 32 KiB.

    Tiles have 32 KiB: an H200 has room for six of them, an L40S for two.
    """
    one = problem("KV8", 1, tokens=131072, limits=Limits(66, capability))
    config = AttentionConfig(8, 128, splits, 4, stages)
    assert registers_by_rule(one, config) == registers
    assert registers_by_rule(one, dataclasses.replace(config, tile_rows=32)) is None
