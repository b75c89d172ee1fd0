"""The operations between two products as Triton kernels, for activations in blocks (`int4`).

Rounding needs the largest magnitudes of blocks, not of rows, so several programs share a row.
`block_norm` has the norm.
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
from mpjax.kernels.launch import Settings, first_program_id, launch, load, load_masked, store
from mpjax.kernels.rowwise.triton import CHANNELS_PER_WARP, NEIGHBOURS
from mpjax.kernels.target import current_target

BLOCKS_PER_PROGRAM = 8


class Operands(NamedTuple):
    """The inputs of a kernel: arrays outside of it, references inside; None for missing inputs.

    A result has the channels of `terms`, or half as many if their first half are gates.
    """

    terms: Any  # [splits, rows, channels]
    blocks: ActivationBlocks  # bits [blocks], permutation [channels]; of experts [experts, ...]
    expert: Any = None  # int32 [rows of the result]
    source: Any = None  # int32 [rows of the result]


class Tile(NamedTuple):
    """Whole blocks of one row: [blocks, 128] or, of the blocks, [blocks]."""

    row: jax.Array
    block: jax.Array
    channel: jax.Array
    mask: jax.Array | None  # None if all channels exist
    block_mask: jax.Array | None

    @classmethod
    def of(cls, first: Any, count: int, channels: int) -> Tile:
        """`count` blocks, a power of two, from the block `first` on, of the program's row."""
        row = first_program_id()
        block = first + jnp.arange(count)
        # The added zero limits a thread's contiguous channels to NEIGHBOURS, as in `triton.py`.
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


# These functions have their own `jit`, so that calls outside of any `jit` compile once.
@functools.partial(jax.jit, static_argnames=("dtype", "interpret"))
def gated_silu(
    terms: jax.Array, blocks: ActivationBlocks, *, dtype: jnp.dtype, interpret: bool = False
) -> QuantizedActivations:
    """SiLU(gate) · up, quantised blockwise; see the public function."""
    splits, *shape, both = terms.shape
    operands = Operands(terms.reshape(splits, -1, both), blocks)
    result = _launch(_gated_kernel, operands, both // 2, dtype, "gated_silu", interpret)
    return of_shape(result, shape)


@functools.partial(jax.jit, static_argnames=("dtype", "interpret"))
def quantize_rows(
    x: jax.Array,
    blocks: ActivationBlocks,
    *,
    dtype: jnp.dtype | None = None,
    interpret: bool = False,
) -> QuantizedActivations:
    """X [..., K] rounded to blocks, with `dtype` or x's dtype; see the public function."""
    *shape, channels = x.shape
    operands = Operands(x.reshape(1, -1, channels), blocks)
    dtype = x.dtype if dtype is None else dtype
    result = _launch(_quantize_kernel, operands, channels, dtype, "quantize_rows", interpret)
    return of_shape(result, shape)


@functools.partial(jax.jit, static_argnames="interpret")
def quantize_rows_of_experts(
    x: jax.Array,
    blocks: ActivationBlocks,
    expert: jax.Array,
    source: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> QuantizedActivations:
    """Rows of x [rows of x, K] rounded to the blocks of experts: [rows, K], in the dtype of x.

    blocks: bits [experts, blocks], permutation [experts, K].
    expert: int32 [rows], the expert whose blocks each result row has; below 0 for the first.
    source: int32 [rows], the row of x for each result row. None: each row of x has equally many
        consecutive result rows.
    """
    operands = Operands(x[None], blocks, expert, source)
    kernel = functools.partial(_routed_kernel, per_row=len(expert) // len(x))
    name = "quantize_rows_experts"
    result = _launch(kernel, operands, x.shape[1], x.dtype, name, interpret)
    return of_shape(result, expert.shape)


def _launch(
    kernel: Any, operands: Operands, channels: int, dtype: Any, name: str, interpret: bool
) -> QuantizedActivations:
    """Launches a kernel whose programs each process a part of a row."""
    rows, blocks = operands.terms.shape[1], pl.cdiv(channels, BLOCK)
    if operands.expert is not None:
        rows = len(operands.expert)
    count = min(BLOCKS_PER_PROGRAM, pl.next_power_of_2(blocks))
    result: QuantizedActivations = launch(
        functools.partial(kernel, count=count),
        operands,
        out_shape=result_of(rows, channels, dtype, operands.blocks),
        grid=(rows, pl.cdiv(blocks, count)),
        settings=Settings(f"{name}_blocks", warps=_warps(count)),
        interpret=interpret,
    )
    return result


def of_shape(result: QuantizedActivations, shape: Sequence[int]) -> QuantizedActivations:
    """Reshapes a result's rows: [..., channels], with this shape.

    Kernels store the scales of a block contiguously, as products load them: [blocks, rows]. XLA
    merges both transpositions.
    """
    values, scales = result.values, result.scales.T
    return dataclasses.replace(
        result,
        values=values.reshape(*shape, values.shape[-1]),
        scales=scales.reshape(*shape, scales.shape[-1]),
    )


def result_of(rows: int, channels: int, dtype: Any, blocks: ActivationBlocks) -> Any:
    """The shapes of a result, with scales [blocks, rows]."""
    shape: Any = jax.ShapeDtypeStruct
    return QuantizedActivations(
        shape((rows, channels), FORMAT.dtype),
        shape((FORMAT.groups(channels), rows), jnp.float32),
        jnp.dtype(dtype).name,
        blocks.permutation is not None,
    )


def _warps(blocks: int) -> int:
    """The number of warps of a program that processes `blocks` blocks at once."""
    return min(16, max(1, blocks * BLOCK // CHANNELS_PER_WARP))


def _gated_kernel(operands: Operands, result_ref: Any, *, count: int) -> None:
    channels = operands.terms.shape[2] // 2
    tile = Tile.of(pl.program_id(1) * count, count, channels)
    channel = moved_channels(operands.blocks, tile)
    gate = sum_of(operands.terms, tile.row, channel, tile.mask)
    up = sum_of(operands.terms, tile.row, channels + channel, tile.mask)
    target = current_target()
    sigmoid = target.reciprocal(1 + target.exp2(gate * -arithmetic.LOG2_E))
    store_tile(result_ref, gate * sigmoid * up, tile, operands.blocks)


def _quantize_kernel(operands: Operands, result_ref: Any, *, count: int) -> None:
    tile = Tile.of(pl.program_id(1) * count, count, operands.terms.shape[2])
    wide = load_wide(
        operands.terms.at[0, tile.row, moved_channels(operands.blocks, tile)], tile.mask
    )
    store_tile(result_ref, wide, tile, operands.blocks)


def _routed_kernel(operands: Operands, result_ref: Any, *, count: int, per_row: int) -> None:
    tile = Tile.of(pl.program_id(1) * count, count, operands.terms.shape[2])
    expert = jnp.maximum(load(operands.expert.at[tile.row]), 0)
    channel = moved_channels(operands.blocks, tile, expert)
    if operands.source is None:
        source = jax.lax.div(tile.row, per_row)
    else:
        source = load(operands.source.at[tile.row])
    wide = load_wide(operands.terms.at[0, source, channel], tile.mask)
    store_tile(result_ref, wide, tile, operands.blocks, expert)


def moved_channels(
    blocks: ActivationBlocks, tile: Tile, expert: jax.Array | None = None
) -> jax.Array:
    """The operands' channels that become a tile's channels, int32 of the tile's shape."""
    if blocks.permutation is None:
        return tile.channel
    order = _of_expert(blocks.permutation, expert, tile.channel)
    moved: jax.Array = load_masked(order, tile.mask)
    return moved


def _of_expert(ref: Any, expert: jax.Array | None, index: jax.Array) -> Any:
    """The entries of an array, or of an expert's row of it."""
    return ref.at[index] if expert is None else ref.at[expert, index]


def sum_of(terms: Any, row: jax.Array, channel: jax.Array, mask: jax.Array | None) -> jax.Array:
    """The sum of all terms [splits, rows, channels] at some channels of a row, in float32."""
    return functools.reduce(
        jnp.add, [load_wide(terms.at[i, row, channel], mask) for i in range(terms.shape[0])]
    )


def load_wide(ref: Any, mask: jax.Array | None) -> jax.Array:
    """The elements of a reference as float32, zeros where the mask is false."""
    return load_masked(ref, mask).astype(jnp.float32)


def store_tile(
    ref: Any,
    wide: jax.Array,
    tile: Tile,
    blocks: ActivationBlocks,
    expert: jax.Array | None = None,
) -> None:
    """Stores the codes of values [blocks, 128] and the scales of their blocks."""
    top = jnp.full(tile.block.shape, 127.0, jnp.float32)
    if blocks.bits is not None:
        bits = load_masked(_of_expert(blocks.bits, expert, tile.block), tile.block_mask)
        top = jnp.where(bits == 4, jnp.float32(7), top)
    factors, peaks = factors_of([wide], top)
    values = round_to_codes(wide, factors)
    row = tile.row
    store(ref.values.at[row, tile.channel], values.astype(ref.values.dtype), mask=tile.mask)
    store(ref.scales.at[tile.block, row], peaks * (1 / top), mask=tile.block_mask)


def factors_of(parts: Sequence[jax.Array], top: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The factors from values to codes, and the values of the largest codes, float32 [blocks] each.

    parts: float32 [blocks, channels], which together are whole blocks. top: float32 [blocks], the
        largest code of each block, 7 or 127.
    """
    peak = functools.reduce(jnp.maximum, [arithmetic.largest_magnitude(part, 1) for part in parts])
    peak = jnp.where(peak < NEARLY_ZERO, top, peak)
    return top / peak, peak


def round_to_codes(wide: jax.Array, factors: jax.Array) -> jax.Array:
    """The codes of values [blocks, channels], int32, of which only the low 8 bits are valid."""
    # Adding 1.5 · 2²³ rounds to an integer, which is then in the low bits of the sum.
    values = wide * factors[:, None] + 1.5 * 2.0**23
    return jax.lax.bitcast_convert_type(values, jnp.int32)
