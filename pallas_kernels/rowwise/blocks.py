"""The operations between two products as Triton kernels, for activations in blocks (`int4`).

A norm needs its whole row, so that one program has it. The other operations have no sum over a row
but the largest magnitudes of blocks, so that several programs share a row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels import arithmetic
from mpjax.kernels.activation_blocks import BLOCK, FORMAT, ActivationBlocks
from mpjax.kernels.activations import NEARLY_ZERO, QuantizedActivations
from mpjax.kernels.launch import Settings, first_program_id, launch, load_masked, store
from mpjax.kernels.rowwise.triton import CHANNELS_PER_WARP, NEIGHBOURS
from mpjax.kernels.target import current_target

BLOCKS_PER_PROGRAM = 8  # of programs that share a row


class _Operands(NamedTuple):
    """The inputs of a kernel: arrays outside of it, references inside; None where there are none.

    A result has the channels of `terms`, or half as many where gates come before them.
    """

    terms: Any  # [splits, rows, channels]
    blocks: ActivationBlocks  # bits [blocks], permutation [channels]
    residual: Any = None  # [rows, channels]
    weight: Any = None  # [channels]


class _Tile(NamedTuple):
    """Whole blocks of one row: [blocks, 128] or, of the blocks, [blocks]."""

    row: jax.Array
    block: jax.Array
    channel: jax.Array
    mask: jax.Array | None  # None where all channels exist
    block_mask: jax.Array | None

    @classmethod
    def of(cls, first: Any, count: int, channels: int) -> _Tile:
        """`count` blocks, a power of two, from the block `first` on, of the program's row."""
        row = first_program_id()
        block = first + jnp.arange(count)
        # The zero keeps a thread's channels to NEIGHBOURS, as in `triton.py`.
        lane = jnp.arange(BLOCK) + (row >> 31) * NEIGHBOURS
        channel = block[:, None] * BLOCK + lane[None, :]
        is_whole = channels % (count * BLOCK) == 0
        return cls(
            row,
            block,
            channel,
            None if is_whole else channel < channels,
            None if is_whole else block * BLOCK < channels,
        )


# These functions have a `jit` of their own, so that calls outside of any `jit` compile once.
@functools.partial(jax.jit, static_argnames=("epsilon", "interpret"))
def add_rms_norm(
    terms: jax.Array,
    residual: jax.Array | None,
    weight: jax.Array,
    blocks: ActivationBlocks,
    *,
    epsilon: float,
    interpret: bool = False,
) -> tuple[jax.Array, QuantizedActivations]:
    """The stream and its norm, rounded to blocks; see the public function."""
    splits, *shape, channels = terms.shape
    rows = terms.size // (splits * channels)
    operands = _Operands(
        terms.reshape(splits, rows, channels),
        blocks,
        None if residual is None else residual.reshape(rows, channels),
        weight,
    )
    count = pl.next_power_of_2(pl.cdiv(channels, BLOCK))
    stream, result = _launch(
        functools.partial(_norm_kernel, epsilon=epsilon),
        operands,
        (
            jax.ShapeDtypeStruct((rows, channels), weight.dtype),
            _result(rows, channels, weight.dtype, blocks),
        ),
        (rows,),
        count,
        "add_rms_norm",
        interpret,
    )
    return stream.reshape(*shape, channels), _of_shape(result, shape)


@functools.partial(jax.jit, static_argnames=("dtype", "interpret"))
def gated_silu(
    terms: jax.Array, blocks: ActivationBlocks, *, dtype: jnp.dtype, interpret: bool = False
) -> QuantizedActivations:
    """SiLU(gate) · up, rounded to blocks; see the public function."""
    splits, *shape, both = terms.shape
    operands = _Operands(terms.reshape(splits, -1, both), blocks)
    result = _launch_parts(_gated_kernel, operands, both // 2, dtype, "gated_silu", interpret)
    return _of_shape(result, shape)


@functools.partial(jax.jit, static_argnames="interpret")
def quantize_rows(
    x: jax.Array, blocks: ActivationBlocks, *, interpret: bool = False
) -> QuantizedActivations:
    """X [..., K] rounded to blocks; see the public function."""
    *shape, channels = x.shape
    operands = _Operands(x.reshape(1, -1, channels), blocks)
    result = _launch_parts(
        _quantize_kernel, operands, channels, x.dtype, "quantize_rows", interpret
    )
    return _of_shape(result, shape)


def _launch_parts(
    kernel: Any, operands: _Operands, channels: int, dtype: Any, name: str, interpret: bool
) -> QuantizedActivations:
    """Launches a kernel whose programs have parts of a row each."""
    rows, blocks = operands.terms.shape[1], pl.cdiv(channels, BLOCK)
    count = min(BLOCKS_PER_PROGRAM, pl.next_power_of_2(blocks))
    grid = rows, pl.cdiv(blocks, count)
    out_shape = _result(rows, channels, dtype, operands.blocks)
    result: QuantizedActivations = _launch(
        kernel, operands, out_shape, grid, count, name, interpret
    )
    return result


def _launch(
    kernel: Any,
    operands: _Operands,
    out_shape: Any,
    grid: tuple[int, ...],
    count: int,
    name: str,
    interpret: bool,
) -> Any:
    """Launches a kernel whose programs take `count` blocks of a row at a time."""
    return launch(
        functools.partial(kernel, count=count),
        operands,
        out_shape=out_shape,
        grid=grid,
        settings=Settings(f"{name}_blocks", warps=_warps(count)),
        interpret=interpret,
    )


def _of_shape(result: QuantizedActivations, shape: Sequence[int]) -> QuantizedActivations:
    """A result [..., channels] of rows of that shape.

    Kernels write the scales of a block side by side, as products read them: [blocks, rows]. Both
    transpositions are one array to XLA.
    """
    values, scales = result.values, result.scales.T
    return dataclasses.replace(
        result,
        values=values.reshape(*shape, values.shape[-1]),
        scales=scales.reshape(*shape, scales.shape[-1]),
    )


def _result(rows: int, channels: int, dtype: Any, blocks: ActivationBlocks) -> Any:
    """Shapes of a result, with scales [blocks, rows]."""
    shape: Any = jax.ShapeDtypeStruct
    return QuantizedActivations(
        shape((rows, channels), FORMAT.dtype),
        shape((FORMAT.groups(channels), rows), jnp.float32),
        jnp.dtype(dtype).name,
        blocks.permutation is not None,
    )


def _warps(blocks: int) -> int:
    """The warps of a program that has so many blocks at once."""
    return min(16, max(1, blocks * BLOCK // CHANNELS_PER_WARP))


def _norm_kernel(
    operands: _Operands, stream_ref: Any, result_ref: Any, *, epsilon: float, count: int
) -> None:
    channels = operands.terms.shape[2]
    tile = _Tile.of(0, count, channels)
    row, channel, mask = tile.row, tile.channel, tile.mask
    # The channels of the result are loaded again, since registers can't be indexed: from the L1
    # cache, and in flight during the sum over the row.
    moved = _moved(operands, tile)
    scale = _load(operands.weight.at[moved], mask)
    stream = _stream(operands, row, channel, mask, stream_ref.dtype)
    again = stream if moved is channel else _stream(operands, row, moved, mask, stream_ref.dtype)
    store(stream_ref.at[row, channel], stream, mask=mask)
    wide = stream.astype(jnp.float32)
    squares = jnp.sum(jnp.sum(wide * wide, 1))  # Triton sums along one axis at a time
    factor = jax.lax.rsqrt(squares / channels + epsilon)
    _store(result_ref, again.astype(jnp.float32) * factor * scale, tile, operands.blocks)


def _stream(operands: _Operands, row: Any, channel: Any, mask: Any, dtype: Any) -> jax.Array:
    """The sum of terms and residual at some channels of a row, as it is stored."""
    wide = _sum(operands.terms, row, channel, mask)
    if operands.residual is not None:
        wide += _load(operands.residual.at[row, channel], mask)
    return wide.astype(dtype)


def _gated_kernel(operands: _Operands, result_ref: Any, *, count: int) -> None:
    channels = operands.terms.shape[2] // 2
    tile = _Tile.of(pl.program_id(1) * count, count, channels)
    channel = _moved(operands, tile)
    gate = _sum(operands.terms, tile.row, channel, tile.mask)
    up = _sum(operands.terms, tile.row, channels + channel, tile.mask)
    target = current_target()
    sigmoid = target.reciprocal(1 + target.exp2(gate * -arithmetic.LOG2_E))
    _store(result_ref, gate * sigmoid * up, tile, operands.blocks)


def _quantize_kernel(operands: _Operands, result_ref: Any, *, count: int) -> None:
    tile = _Tile.of(pl.program_id(1) * count, count, operands.terms.shape[2])
    wide = _load(operands.terms.at[0, tile.row, _moved(operands, tile)], tile.mask)
    _store(result_ref, wide, tile, operands.blocks)


def _moved(operands: _Operands, tile: _Tile) -> jax.Array:
    """The channels of the operands that become the channels of a tile."""
    if operands.blocks.permutation is None:
        return tile.channel
    moved: jax.Array = load_masked(operands.blocks.permutation.at[tile.channel], tile.mask)
    return moved


def _sum(terms: Any, row: jax.Array, channel: jax.Array, mask: jax.Array | None) -> jax.Array:
    return functools.reduce(
        jnp.add, [_load(terms.at[i, row, channel], mask) for i in range(terms.shape[0])]
    )


def _load(ref: Any, mask: jax.Array | None) -> jax.Array:
    return load_masked(ref, mask).astype(jnp.float32)


def _store(ref: Any, wide: jax.Array, tile: _Tile, blocks: ActivationBlocks) -> None:
    """Writes the codes of values [blocks, 128] and the scales of their blocks."""
    top = jnp.full(tile.block.shape, 127.0, jnp.float32)
    if blocks.bits is not None:
        bits = load_masked(blocks.bits.at[tile.block], tile.block_mask)
        top = jnp.where(bits == 4, jnp.float32(7), top)
    peak = arithmetic.largest_magnitude(wide, 1)
    peak = jnp.where(peak < NEARLY_ZERO, top, peak)
    # Adding 1.5 · 2²³ rounds to an integer, which the low bits of the sum then hold.
    values = wide * (top / peak)[:, None]
    values = jax.lax.bitcast_convert_type(values + 1.5 * 2.0**23, jnp.int32)
    row = tile.row
    store(ref.values.at[row, tile.channel], values.astype(ref.values.dtype), mask=tile.mask)
    store(ref.scales.at[tile.block, row], peak * (1 / top), mask=tile.block_mask)
