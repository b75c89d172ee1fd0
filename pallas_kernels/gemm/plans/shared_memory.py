"""What a program has in shared memory at a time, and whether there is room for it."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp

from mpjax.kernels import codes as code_kinds
from mpjax.kernels import device
from mpjax.kernels.codes.look_up import ROW_BYTES, pair_rows
from mpjax.kernels.device import Limits
from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.gemm.plans.configuration import ROWS, TritonConfig, WarpgroupConfig

CAPABILITY = 9.0  # of the GPUs that have `wgmma`
BARRIER_BYTES = 2048  # at most, with what the start of each array is rounded up by
BLOCKS = 2  # of words on their way or in use, where there are many rows
MOST_STAGES = 8  # tiles of x, likewise
LEAST_STAGES = 2  # of them: a tile is free when the product of the next one has begun
LEAST_PLANES = 4  # likewise of tiles for a plane: with two, products wait for copies
MOST_OUT_ROWS = 64  # of a tile on its way out


class Stages(NamedTuple):
    """What is in shared memory of the blocks that one warpgroup goes through."""

    blocks: int  # of words
    x: int  # tiles of x
    parts: int  # tiles of x for a block: 1, which comes with its words, or one for each plane
    out_rows: int  # of a tile on its way out


def stages(format: WeightFormat, config: WarpgroupConfig, dtype: jnp.dtype) -> Stages:
    """As many as there is room for, or none; a power of two where x comes plane by plane.

    dtype: of the output. Tiles of few rows or of 8 bits are small: they are for whole blocks, and
        as many.
    """
    width = format.plane_width * format.word_bits // 8
    words = config.tile_n * (format.columns * width + 4 * format.parameters_of_block)
    plane = config.tile_m * width
    out_rows = math.gcd(*config.products, config.finished_rows, MOST_OUT_ROWS)
    row = config.tile_n * dtype.itemsize
    pairs = ROW_BYTES * pair_rows(format.bits) if code_kinds.of(format).has_table else 0
    room = device.shared_memory(CAPABILITY) - BARRIER_BYTES - sent_bytes(config) - pairs
    if config.has_few_rows or format.operand:
        room = (room - out_rows * row) // config.shares
        count = max(0, min(MOST_STAGES // config.shares, room // (words + format.planes * plane)))
        # Five and six were measured to be slower than four, and four slower than eight.
        count = 4 if 4 < count < MOST_STAGES else count
        return Stages(count, count, 1, out_rows)
    room -= BLOCKS * words
    if room - out_rows * row < LEAST_PLANES * plane:
        out_rows = max(ROWS, out_rows // 2)  # parts of a tile take turns
    most = max(0, min(MOST_STAGES, (room - out_rows * row) // plane))
    # Its place is then found without a division.
    return Stages(BLOCKS, 1 << most.bit_length() - 1 if most else 0, format.planes, out_rows)


def sent_bytes(config: WarpgroupConfig) -> int:
    """Bytes for sums that warpgroups send to others, 32 bits each; see `warpgroup_program`."""
    rows = (config.shares - 1) * config.tile_m
    if config.is_cluster:
        rows += config.finished_rows
    return 4 * config.tile_n * rows


def why_no_room(format: WeightFormat, config: WarpgroupConfig) -> str | None:
    """Why a configuration can't run, whatever the output's dtype; None if it can."""
    staged = stages(format, config, jnp.dtype(jnp.float32))
    least = LEAST_STAGES if staged.parts == 1 else LEAST_PLANES
    if staged.x < least:
        return f"shared memory has no room for {least} tiles of x of each warpgroup"
    return None


def triton_bytes(config: TritonConfig, format: WeightFormat, limits: Limits) -> int:
    """Bytes of shared memory that a program of Triton's kernel has, or a few more.

    A load that is `stages` − 1 steps ahead of its use has so many buffers, and one more where
    `wgmma` (compute capability 9.0, four warps or more) still reads the last: it takes x from
    shared memory, and also the weight where words are codes and nothing is decoded.
    """
    channels = format.planes * (config.width or format.plane_width)  # of a step
    words = config.tile_n * channels * format.bits // 8
    x = config.tile_m * channels * format.word_bits // 8
    groups = 0 if format.group_size is None else format.parameters_of_block
    parameters = 4 * groups * (config.tile_n + (config.tile_m if format.operand else 0))
    reads_shared = limits.compute_capability >= 9 and config.warps >= 4 and config.tile_n >= 64
    loop = (config.stages - 1) * (words + x + parameters)
    if reads_shared:
        loop += x + (words if format.is_flat else 0)
    transposed = config.tile_m * config.tile_n * 4  # on the way out, when the loop's are free
    return max(loop, transposed) + code_kinds.of(format).shared_bytes
