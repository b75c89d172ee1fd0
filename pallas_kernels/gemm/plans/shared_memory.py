"""The shared memory of programs of the fused kernels: its contents, and whether it suffices."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp

from mpjax.kernels import codes as code_kinds
from mpjax.kernels import device
from mpjax.kernels.codes.look_up import ROW_BYTES, pair_rows
from mpjax.kernels.device import Limits
from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.gemm.plans.configuration import ROW_MULTIPLE, TritonConfig, WarpgroupConfig

WGMMA_CAPABILITY = 9.0  # the compute capability of GPUs with `wgmma`
BARRIER_BYTES = 2048  # the most bytes of all barriers, and of the padding between arrays
# The most bytes between arrays, each of which begins at a multiple of 1024 bytes. They are counted
# where further output tiles fill the remaining memory.
ALIGNMENT_BYTES = 8192
WORD_BLOCKS = 2  # slots for blocks of words, if x is copied plane by plane
MOST_X_TILES = 8
# A slot for a tile of x is free once the next tile's product has begun, so there are at least two.
# With two slots for tiles of a plane, products would wait for copies.
LEAST_X_TILES, LEAST_X_TILES_OF_PLANES = 2, 4
MOST_OUT_ROWS = 64  # rows of an output tile


class Stages(NamedTuple):
    """The slots in shared memory for one share of a program's K, for copies in flight or in use."""

    blocks: int  # slots for blocks of words
    x: int  # slots for tiles of x
    parts: int  # tiles of x in a block: 1, copied together with its words, or one for each plane
    out_rows: int  # rows of an output tile, from which sums are copied to global memory
    out_tiles: int = 1  # output tiles of each consumer that stores, which are copied in turn


def stages(
    format: WeightFormat, config: WarpgroupConfig, dtype: jnp.dtype, *, gated: bool = False
) -> Stages:
    """The slots for which shared memory has room; `x` is 0 if it has room for none.

    With few rows or 8-bit activations, a tile of x is small: it covers a whole block, and there are
    as many slots for x as for words. The same applies to plain matrices. Otherwise a tile of x
    covers a plane, and the number of slots is a power of two.

    dtype: of the output. gated: whether the epilogue combines halves of a tile's output channels.
    """
    width = format.plane_width * format.word_bits // 8
    words = config.tile_n * (format.columns * width + 4 * format.parameters_of_block)
    if format.operand and format.group_size and code_kinds.of(format).has_group_scales:
        words += 4 * config.tile_m  # the scales of a block of x
    plane = config.tile_m * width
    out_rows = math.gcd(*config.product_rows, config.finished_rows, MOST_OUT_ROWS)
    row = config.tile_n // (2 if gated else 1) * dtype.itemsize
    pairs = ROW_BYTES * pair_rows(format.bits) if code_kinds.has_table(format) else 0
    room = device.shared_memory(WGMMA_CAPABILITY) - BARRIER_BYTES - sent_bytes(config) - pairs
    room -= 2 * config.tile_m * config.tile_n if gated else 0  # half of the sums, in float32
    if config.has_few_rows or format.operand or format.is_flat:
        room = (room - out_rows * row) // config.shares
        count = max(0, min(MOST_X_TILES // config.shares, room // (words + format.planes * plane)))
        # Measured: five to seven slots are slower than four, and four slower than eight.
        count = 4 if 4 < count < MOST_X_TILES else count
        room -= count * (words + format.planes * plane) + ALIGNMENT_BYTES
        return Stages(count, count, 1, out_rows, _out_tiles(config, out_rows, room // row))
    room -= WORD_BLOCKS * words
    if room - out_rows * row < LEAST_X_TILES_OF_PLANES * plane:
        out_rows = max(ROW_MULTIPLE, out_rows // 2)  # the tile is stored in more parts
    most = max(0, min(MOST_X_TILES, (room - out_rows * row) // plane))
    # With a power of two, the slot of a tile is computed without a division.
    x = 1 << most.bit_length() - 1 if most else 0
    room -= out_rows * row + x * plane + ALIGNMENT_BYTES
    out_tiles = _out_tiles(config, out_rows, room // row)
    return Stages(WORD_BLOCKS, x, format.planes, out_rows, out_tiles)


def _out_tiles(config: WarpgroupConfig, out_rows: int, more_rows: int) -> int:
    """The number of a consumer's output tiles: one, plus those that fit into `more_rows` rows."""
    parts = min(config.most_out_tiles, config.finished_rows // out_rows)
    return 1 + max(0, min(parts - 1, more_rows // out_rows))


def sent_bytes(config: WarpgroupConfig) -> int:
    """The bytes of 32-bit sums that warpgroups send to others of their program or cluster."""
    rows = (config.shares - 1) * config.tile_m
    if config.is_cluster:
        rows += config.finished_rows
    return 4 * config.tile_n * rows


def why_no_room(
    format: WeightFormat, config: WarpgroupConfig, *, gated: bool = False
) -> str | None:
    """The reason why shared memory is too small for a configuration, or None if it suffices.

    The output's dtype is assumed to be float32, the widest.
    """
    staged = stages(format, config, jnp.dtype(jnp.float32), gated=gated)
    least = LEAST_X_TILES if staged.parts == 1 else LEAST_X_TILES_OF_PLANES
    if staged.x < least:
        return f"shared memory has no room for {least} tiles of x of each warpgroup"
    return None


def triton_bytes(config: TritonConfig, format: WeightFormat, limits: Limits) -> int:
    """An upper bound of the bytes of shared memory of a program of Triton's kernel.

    A load is `stages` − 1 steps ahead of its use, and has as many buffers. It has one more if
    `wgmma` (compute capability 9.0, four warps or more) still reads the last buffer: that of x, and
    that of the weight if its words are not decoded.
    """
    channels = format.planes * (config.width or format.plane_width)  # input channels of a step
    words = config.tile_n * channels * format.bits // 8
    x = config.tile_m * channels * format.word_bits // 8
    groups = 0 if format.group_size is None else format.parameters_of_block
    parameters = 4 * groups * (config.tile_n + (config.tile_m if format.operand else 0))
    reads_shared = limits.compute_capability >= 9 and config.warps >= 4 and config.tile_n >= 64
    loop = (config.stages - 1) * (words + x + parameters)
    if reads_shared:
        loop += x + (words if format.is_flat else 0)
    # The output tile, transposed, reuses the loop's memory.
    transposed = config.tile_m * config.tile_n * 4
    return max(loop, transposed) + code_kinds.of(format).shared_bytes
