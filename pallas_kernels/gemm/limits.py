"""What a GPU allows, and whether a configuration of Triton's kernel keeps to it."""

from __future__ import annotations

import jax.numpy as jnp

from mpjax.kernels import codes as code_kinds
from mpjax.kernels import device
from mpjax.kernels.device import Limits
from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.gemm.config import GemmConfig
from mpjax.kernels.mosaic import WARPGROUP_OUTPUTS

# Of a thread's 255 registers; the rest holds words, decoded weights and addresses.
ACCUMULATOR_REGISTERS = 128


def why_not_fused(format: WeightFormat, limits: Limits) -> str | None:
    """Why Triton's kernel can't multiply a format on a GPU; None if it can."""
    if format.activations != "float8":
        return None
    return device.why_not_float8(limits.compute_capability)


def why_no_wgmma(limits: Limits) -> str | None:
    """Why a GPU has not the instruction that warpgroups multiply with; None if it has."""
    if int(limits.compute_capability) == 9:
        return None
    return f"compute capability {limits.compute_capability} has no `wgmma`, which only 9.0 has"


def why_not_warpgroups(format: WeightFormat, outputs: int, limits: Limits) -> str | None:
    """Why the warpgroups' kernel can't multiply a format on a GPU; None if it can.

    outputs: of the weight.
    """
    if reason := why_no_wgmma(limits):
        return reason
    scales_groups = format.group_size is not None and code_kinds.of(format).has_group_scales
    if format.activations and scales_groups:
        return f"{format} has 8-bit activations, and scales per group of input channels"
    if outputs % WARPGROUP_OUTPUTS:
        return f"{outputs} output channels are no multiple of {WARPGROUP_OUTPUTS}"
    return None


def widths(format: WeightFormat) -> tuple[int | None, ...]:
    """Lanes of a plane that a step may take: all, or half of them if rows stay 64 bytes long."""
    half = format.plane_width // 2
    return (None, half) if half * format.word_bits >= 64 * 8 else (None,)


def can_scale_weights(format: WeightFormat) -> bool:
    """Whether `scaling="weight"` is a choice: only 16-bit operands can hold a group's scale."""
    return format.group_size is not None and format.activations is None


def can_be_operand(scale_dtype: str, operand: jnp.dtype) -> bool:
    """Whether the dtype of a product's operands has the range of scales."""
    return operand == jnp.bfloat16 or scale_dtype == operand.name


def why_unsound(config: GemmConfig, format: WeightFormat, limits: Limits) -> str | None:
    """Why a configuration can't run well, or at all, on a GPU; None if it can."""
    if reason := why_not_fused(format, limits):
        return reason
    if config.scaling == "weight" and not can_scale_weights(format):
        return f"{format} has no scales that can be applied to its weights"
    if config.unsplit is not None and config.unsplit % config.tile_n:
        return f"{config.unsplit} channels that are not split are no whole tiles of {config.tile_n}"
    if config.tile_n < 16 * config.warps:
        return f"{config.tile_n} output channels are too few for {config.warps} warps: 16 each"
    if (needed := shared_memory(config, format, limits)) > limits.shared_memory:
        return f"{needed} bytes of shared memory; there are {limits.shared_memory}"
    if (needed := accumulator_registers(config, format)) > ACCUMULATOR_REGISTERS:
        return f"{needed} registers for sums; there is room for {ACCUMULATOR_REGISTERS}"
    return None


def shared_memory(config: GemmConfig, format: WeightFormat, limits: Limits) -> int:
    """Bytes of shared memory that a program of Triton's kernel has, or a few more.

    A load that is `stages` − 1 steps ahead of its use has so many buffers, and one more where
    `wgmma` (compute capability 9.0, four warps or more) still reads the last: it takes x from
    shared memory, and also the weight where words are codes and nothing is decoded.
    """
    channels = format.planes * (config.width or format.plane_width)  # of a step
    words = config.tile_n * channels * format.bits // 8
    x = config.tile_m * channels * format.word_bits // 8
    groups = 0 if format.group_size is None else format.parameters_of_block
    parameters = 4 * groups * (config.tile_n + (config.tile_m if format.activations else 0))
    reads_shared = limits.compute_capability >= 9 and config.warps >= 4 and config.tile_n >= 64
    loop = (config.stages - 1) * (words + x + parameters)
    if reads_shared:
        loop += x + (words if format.is_flat else 0)
    transposed = config.tile_m * config.tile_n * 4  # on the way out, when the loop's are free
    return max(loop, transposed) + code_kinds.of(format).shared_bytes


def accumulator_registers(config: GemmConfig, format: WeightFormat) -> int:
    """Registers of a thread that hold sums: those of a group apart, where they are scaled later."""
    # The groups of liquid4 become int8, so that one sum runs over all of K.
    apart = format.group_size is not None and code_kinds.of(format).has_group_scales
    sums = 2 if apart and config.scaling == "accumulator" else 1
    return sums * config.tile_m * config.tile_n // (32 * config.warps)
