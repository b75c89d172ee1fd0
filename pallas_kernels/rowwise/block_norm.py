"""The residual sum and its norm, permuted and rounded to blocks, on a GPU.

A norm needs its whole row, and rounding to permuted blocks loads channels out of order, of which a
multiprocessor has few loads in flight. So several programs share a row. For few rows, each program
sums up the whole row again, which it loads in order, and rounds its own blocks. For more rows that
costs more than it saves: there the norm is a separate kernel, and another kernel rounds it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels import device
from mpjax.kernels.activation_blocks import BLOCK, ActivationBlocks
from mpjax.kernels.activations import QuantizedActivations
from mpjax.kernels.launch import Settings, launch, store
from mpjax.kernels.rowwise import triton
from mpjax.kernels.rowwise.blocks import (
    Tile,
    load_wide,
    moved_channels,
    of_shape,
    quantize_rows,
    result_of,
    store_tile,
    sum_of,
)
from mpjax.kernels.rowwise.triton import NEIGHBOURS

MOST_BLOCKS = 2  # of a program, which has a thread for each of its channels
WARPS_PER_BLOCK = BLOCK // 32


class _Operands(NamedTuple):
    """The inputs of the kernel: arrays outside of it, references inside."""

    terms: Any  # [splits, rows, H]
    residual: Any  # [rows, H]
    weight: Any  # [H]
    blocks: ActivationBlocks


# This function has its own `jit`, so that calls outside of any `jit` compile once.
@functools.partial(jax.jit, static_argnames=("epsilon", "dtype", "interpret"))
def add_rms_norm(
    terms: jax.Array,
    residual: jax.Array | None,
    weight: jax.Array,
    blocks: ActivationBlocks,
    *,
    epsilon: float,
    dtype: jnp.dtype,
    interpret: bool = False,
) -> tuple[jax.Array, QuantizedActivations]:
    """The stream and its norm, rounded to blocks; see the public function."""
    splits, *shape, channels = terms.shape
    rows = terms.size // (splits * channels)
    count = blocks_per_program(rows, pl.cdiv(channels, BLOCK))
    if count is None:  # the norm is float32 between the kernels, so that it is rounded once
        stream, wide = triton.add_rms_norm(
            terms, residual, weight, epsilon, jnp.dtype(jnp.float32), dtype, interpret=interpret
        )
        assert isinstance(wide, jax.Array)
        return stream, quantize_rows(wide, blocks, dtype=dtype, interpret=interpret)
    operands = _Operands(
        terms.reshape(splits, rows, channels),
        None if residual is None else residual.reshape(rows, channels),
        weight,
        blocks,
    )
    stream, result = launch(
        functools.partial(_kernel, epsilon=epsilon, count=count),
        operands,
        out_shape=(
            jax.ShapeDtypeStruct((rows, channels), dtype),
            result_of(rows, channels, dtype, blocks),
        ),
        grid=(rows, pl.cdiv(channels, count * BLOCK)),
        settings=Settings("add_rms_norm_blocks", warps=count * WARPS_PER_BLOCK),
        interpret=interpret,
    )
    return stream.reshape(*shape, channels), of_shape(result, shape)


def blocks_per_program(rows: int, blocks: int) -> int | None:
    """The number of blocks that each program rounds in one kernel with the norm; None: two kernels.

    A multiprocessor runs one program at a time, so there are at most as many programs.
    """
    count = 1
    while rows * pl.cdiv(blocks, count) > device.multiprocessors():
        count *= 2
        if count > MOST_BLOCKS or count >= 2 * blocks:
            return None
    return count


def _kernel(
    operands: _Operands, stream_ref: Any, result_ref: Any, *, epsilon: float, count: int
) -> None:
    channels = operands.terms.shape[2]
    first = pl.program_id(1) * count
    tile = Tile.of(first, count, channels)
    moved = moved_channels(operands.blocks, tile)
    # Loaded first, because the compiler does not move loads up past the sum of the row.
    own = _stream(operands, tile.row, moved, tile.mask, stream_ref.dtype)
    weight = load_wide(operands.weight.at[moved], tile.mask)
    size = pl.next_power_of_2(channels)
    # The added zero limits a thread's contiguous channels to NEIGHBOURS, as in `triton.py`.
    channel = jnp.arange(size) + (tile.row >> 31) * NEIGHBOURS
    mask = None if channels == size else channel < channels
    stream = _stream(operands, tile.row, channel, mask, stream_ref.dtype)
    is_own = (channel >= first * BLOCK) & (channel < (first + count) * BLOCK)
    is_own = is_own if mask is None else is_own & mask
    store(stream_ref.at[tile.row, channel], stream, mask=is_own)
    wide = stream.astype(jnp.float32)
    factor = jax.lax.rsqrt(jnp.sum(wide * wide) / channels + epsilon)
    store_tile(result_ref, own.astype(jnp.float32) * factor * weight, tile, operands.blocks)


def _stream(
    operands: _Operands, row: jax.Array, channel: jax.Array, mask: Any, dtype: jnp.dtype
) -> jax.Array:
    """The residual stream including the terms, at some channels, in its dtype."""
    wide = sum_of(operands.terms, row, channel, mask)
    if operands.residual is not None:
        wide += load_wide(operands.residual.at[row, channel], mask)
    return wide.astype(dtype)
