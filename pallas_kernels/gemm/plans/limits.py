"""Reasons why a fused kernel can't multiply a problem on its GPU, or not with a configuration."""

from __future__ import annotations

import jax.numpy as jnp

from mpjax.kernels import codes as code_kinds
from mpjax.kernels import device
from mpjax.kernels.device import Limits
from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.gemm.plans.configuration import TritonConfig
from mpjax.kernels.gemm.plans.problem import Problem
from mpjax.kernels.gemm.plans.shared_memory import triton_bytes
from mpjax.kernels.mosaic import WARPGROUP_OUTPUTS

# The most of a thread's 255 registers for sums; words, decoded weights and addresses need others.
ACCUMULATOR_REGISTERS = 128


def why_not_triton(problem: Problem) -> str | None:
    """The reason why Triton's kernel can't multiply a problem on its GPU, or None if it can."""
    if problem.weight.operand != "float8":
        return None
    return device.why_not_float8(problem.limits.compute_capability)


def why_no_wgmma(limits: Limits) -> str | None:
    """The reason why a GPU lacks `wgmma`, the instruction of warpgroups, or None if it has it."""
    if int(limits.compute_capability) == 9:
        return None
    return f"compute capability {limits.compute_capability} has no `wgmma`, which only 9.0 has"


def why_not_warpgroups(problem: Problem) -> str | None:
    """The reason why the warpgroup kernel can't multiply a problem, or None if it can."""
    if reason := why_no_wgmma(problem.limits):
        return reason
    format, outputs = problem.weight, problem.outputs
    scales_groups = format.group_size is not None and code_kinds.of(format).has_group_scales
    if format.operand and scales_groups and format.codes != "int4":
        return f"{format} has 8-bit activations, and scales per group of input channels"
    if outputs % WARPGROUP_OUTPUTS:
        return f"{outputs} output channels are no multiple of {WARPGROUP_OUTPUTS}"
    return None


def widths(format: WeightFormat) -> tuple[int | None, ...]:
    """The possible lanes of a plane per step: all (None), or half if rows stay 64 bytes long."""
    half = format.plane_width // 2
    return (None, half) if half * format.word_bits >= 64 * 8 else (None,)


def can_scale_weights(format: WeightFormat) -> bool:
    """Whether `scaling="weight"` is possible: with group scales and 16-bit operands."""
    has_scales = format.group_size is not None and code_kinds.of(format).has_group_scales
    return has_scales and format.operand is None


def can_be_operand(scale_dtype: str, operand: jnp.dtype) -> bool:
    """Whether `operand`, the dtype of a product's operands, has the range of the scales' dtype."""
    return operand == jnp.bfloat16 or scale_dtype == operand.name


def why_unsound(config: TritonConfig, problem: Problem) -> str | None:
    """The reason why Triton's kernel can't run (well) with a configuration, or None if it can."""
    if reason := why_not_triton(problem):
        return reason
    format, available = problem.weight, problem.limits.shared_memory
    if config.scaling == "weight" and not can_scale_weights(format):
        return f"{format} has no scales that can be applied to its weights"
    if config.unsplit is not None and config.unsplit % config.tile_n:
        return f"{config.unsplit} channels that are not split are no whole tiles of {config.tile_n}"
    if config.tile_n < 16 * config.warps:
        return f"{config.tile_n} output channels are too few for {config.warps} warps: 16 each"
    if (needed := triton_bytes(config, format, problem.limits)) > available:
        return f"{needed} bytes of shared memory; there are {available}"
    if (needed := accumulator_registers(config, format)) > ACCUMULATOR_REGISTERS:
        return f"{needed} registers for sums; there is room for {ACCUMULATOR_REGISTERS}"
    return None


def accumulator_registers(config: TritonConfig, format: WeightFormat) -> int:
    """The registers of a thread that contain sums.

    Twice as many if the sum of a group is scaled before it is added to the sum over K.
    """
    # The groups of liquid4 are decoded to int8 including their scales, so one sum suffices.
    apart = format.group_size is not None and code_kinds.of(format).has_group_scales
    sums = 2 if apart and config.scaling == "accumulator" else 1
    return sums * config.tile_m * config.tile_n // (32 * config.warps)
