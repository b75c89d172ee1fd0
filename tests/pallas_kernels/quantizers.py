"""The computation of `mpjax.kernels.quantize`, written in numpy from the description."""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np

from mpjax.kernels import WeightFormat
from mpjax.kernels.codes.table import normal_float

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


class Quantized(NamedTuple):
    codes: np.ndarray  # [K, N]
    scales: np.ndarray  # [groups, N]
    zeros: np.ndarray  # [groups, N]; 0 where a kind has none
    channel_scales: np.ndarray | None = None  # [N]


def oracle(weight: np.ndarray, format: WeightFormat, table: np.ndarray | None = None) -> Quantized:
    """Quantises as `pallas_kernels/codes` describes, group by group of input channels, in float32.

    XLA divides by a scale that many share as it multiplies by its reciprocal.
    """
    weight = weight.astype(np.float32)
    if format.codes == "liquid4":
        return liquid_oracle(weight)
    size = format.group_size or weight.shape[0]
    groups = np.split(weight, range(size, weight.shape[0], size))
    if format.codes == "float8":
        return join([float8_oracle(group, format.group_size) for group in groups])
    if format.codes == "float4":
        return join([float4_oracle(group) for group in groups])
    if format.codes == "int8":
        return join([int8_oracle(group) for group in groups])
    if format.codes == "int4":
        return join([int4_oracle(group) for group in groups])
    if format.codes.startswith("table"):
        entries = normal_float(format.bits) if table is None else table
        return join([table_oracle(group, entries) for group in groups])
    if format.codes.startswith("affine"):
        return join([affine_oracle(group, format.bits) for group in groups])
    return join([integer_oracle(group, format) for group in groups])


def join(groups: list[Quantized]) -> Quantized:
    codes, scales, zeros = zip(*[group[:3] for group in groups], strict=True)
    return Quantized(np.concatenate(codes), np.stack(scales), np.stack(zeros))


def integer_oracle(group: np.ndarray, format: WeightFormat) -> Quantized:
    top = 2**format.bits - 1
    low, high = np.minimum(group.min(0), 0), np.maximum(group.max(0), 0)
    if format.symmetric:
        high = np.abs(group).max(0)
        low = -high
    scale = ((high - low) * np.float32(1 / top)).astype(np.float16)
    step = np.where(scale == 0, np.float16(1), scale).astype(np.float32)
    inverse = np.float32(1) / step
    zero = np.clip(np.rint(-low * inverse), 0, top)
    if format.symmetric:
        zero = np.full_like(step, (top + 1) // 2)
    codes = np.clip(np.rint(group * inverse) + zero, 0, top)
    return Quantized(codes, step.astype(np.float16), zero)


def affine_oracle(group: np.ndarray, bits: int) -> Quantized:
    """The smallest weight, and steps up to the largest one; here `zeros` are the minima."""
    minimum = group.min(0).astype(np.float16).astype(np.float32)
    scale = ((group.max(0) - minimum) * np.float32(1 / (2**bits - 1))).astype(np.float16)
    scale = np.where(scale <= 0, np.float16(1), scale)
    inverse = np.float32(1) / scale.astype(np.float32)
    codes = np.clip(np.rint((group - minimum) * inverse), 0, 2**bits - 1)
    return Quantized(codes, scale, minimum.astype(np.float16))


def float8_oracle(group: np.ndarray, tile: int | None) -> Quantized:
    """One scale for each output channel, or for each run of `tile` of them."""
    peak = np.abs(group).max(0)
    if tile is not None:
        for first in range(0, len(peak), tile):
            peak[first : first + tile] = peak[first : first + tile].max()
    scale = peak * np.float32(1 / 448)
    scale = np.where(scale == 0, np.float32(1), scale)
    return Quantized(
        np.clip(group * (np.float32(1) / scale), -448, 448).astype(E4M3), scale, 0 * scale
    )


def int4_oracle(group: np.ndarray) -> Quantized:
    scale = np.abs(group).max(0) * np.float32(2 / 15)
    scale = np.where(scale == 0, np.float32(1), scale)
    return Quantized(np.clip(np.rint(group * (np.float32(1) / scale)), -8, 7), scale, 0 * scale)


def float4_oracle(group: np.ndarray) -> Quantized:
    """Powers of two, with which the largest magnitude is from 4 to 8, and e2m1's nearest codes."""
    peak = np.abs(group).max(0)
    with np.errstate(divide="ignore"):
        scale = np.where(peak == 0, 1, 2.0 ** (np.floor(np.log2(peak)) - 2)).astype(np.float32)
    values = np.clip(group / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    codes = values.view(np.uint8) & 15
    return Quantized(np.where((values == 0) & (group >= 0), 0, codes), scale, 0 * scale)


def int8_oracle(group: np.ndarray) -> Quantized:
    scale = np.abs(group).max(0) * np.float32(1 / 127)
    scale = np.where(scale == 0, np.float32(1), scale)
    return Quantized(np.clip(np.rint(group * (np.float32(1) / scale)), -127, 127), scale, 0 * scale)


def table_oracle(group: np.ndarray, table: np.ndarray) -> Quantized:
    """The nearest entry, and of two that are equally near, the lower one."""
    scale = (np.abs(group).max(0) / np.abs(table).max()).astype(np.float16)
    step = np.where(scale == 0, np.float16(1), scale).astype(np.float32)
    middles = (table[1:] + table[:-1]) / 2
    codes = ((group * (np.float32(1) / step))[..., None] > middles).sum(-1)
    return Quantized(codes, scale, np.zeros(step.shape))


def liquid_oracle(weight: np.ndarray) -> Quantized:
    channel_scales = np.abs(weight).max(0) * np.float32(1 / 119)
    channel_scales = np.where(channel_scales == 0, np.float32(1), channel_scales)
    first = np.rint(weight * (np.float32(1) / channel_scales))
    first = np.clip(first, -119, 119).astype(int)

    def second(group: np.ndarray) -> Quantized:
        low = group.min(0)
        step = np.maximum(1, np.floor((group.max(0) - low) / 15 + 0.5))
        codes = np.minimum(15, np.floor((group - low) / step + 0.5))
        return Quantized(codes, step, low + 128)

    groups = join([second(group) for group in np.split(first, len(first) // 64)])
    return groups._replace(channel_scales=channel_scales)
