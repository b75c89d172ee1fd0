"""The product of tiles of rows with the matrices of a stack, by the warpgroup kernel.

It is the dense product's kernel. A program looks up its matrix, the expert of its tile of rows, in
an array, and copies that expert's blocks out of the stack. Blocks are words, or plain weights,
which the tensor cores use unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels.activations import QuantizedActivations
from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.gemm.plans.configuration import WarpgroupConfig
from mpjax.kernels.gemm.plans.shared_memory import stages
from mpjax.kernels.gemm.warpgroups.launch import bands_of, run_programs, scales_of_rows
from mpjax.kernels.gemm.warpgroups.program import Arguments, Call
from mpjax.kernels.mosaic.launch import Grid
from mpjax.kernels.quantized_tensor import QuantizedTensor


class Tiles(NamedTuple):
    """The experts of tiles of rows, and the operations on their products, in this order.

    experts: int32 [tiles], −1 for a tile whose products are not computed.
    bias: [experts, N], added. gate: combines the two halves of N. weights: float32 [rows], a
    factor.
    """

    experts: jax.Array
    bias: jax.Array | None = None
    gate: Callable[[jax.Array, jax.Array], jax.Array] | None = None
    weights: jax.Array | None = None


class Stack(NamedTuple):
    """A stack of matrices [experts, K, N], out of which programs copy blocks.

    blocks: of K, in each matrix. words, parameters, table, channel_scales: as in `Arguments`.
    """

    format: WeightFormat
    scale_dtype: str
    blocks: int
    outputs: int
    words: jax.Array
    parameters: jax.Array | None = None
    table: jax.Array | None = None
    channel_scales: jax.Array | None = None

    @classmethod
    def of(cls, weight: jax.Array | QuantizedTensor) -> Stack:
        """The stack of a packed weight, or of a plain weight in bfloat16 or float16."""
        if not isinstance(weight, QuantizedTensor):
            format = WeightFormat(weight.dtype.name)
            _, channels, outputs = weight.shape
            return cls(format, weight.dtype.name, channels // format.block, outputs, weight)
        return cls(
            weight.format,
            weight.scale_dtype,
            weight.padded_channels // weight.format.block,
            weight.shape[-1],
            _joined(weight.words),
            _joined(weight.parameters),
            None if weight.table is None else weight.table.astype(jnp.float32),
            weight.channel_scales,
        )


def products(
    x: jax.Array | QuantizedActivations,
    weight: jax.Array | QuantizedTensor,
    tiles: Tiles,
    config: WarpgroupConfig,
    out_dtype: jnp.dtype,
    *,
    interpret: bool = False,
) -> jax.Array:
    """The products [rows, N] of each tile of rows with its expert's matrix, or [rows, N / 2].

    x: [rows, K], config.tile_m rows for each tile; K is padded as in `Arguments`. weight:
    [experts, K, N], accepted by `why_not_warpgroups`; a plain weight has the dtype of x.
    config: without splits and shares. out_dtype: a float of 16 or 32 bits.
    """
    values, x_scales = (x, None) if isinstance(x, jax.Array) else (x.values, x.scales)
    stack, is_gated = Stack.of(weight), tiles.gate is not None
    format, outputs = stack.format, stack.outputs // (2 if is_gated else 1)
    bands, band_tiles = bands_of(len(tiles.experts), values.size * values.dtype.itemsize)
    call = Call(
        format=format,
        scale_dtype=stack.scale_dtype,
        config=config,
        splits=1,
        stages=stages(format, config, out_dtype, gated=is_gated),
        operand=values.dtype,
        sum_dtype=jnp.dtype(jnp.int32 if values.dtype == jnp.int8 else jnp.float32),
        axis=None,
        band_tiles=band_tiles if bands > 1 else None,
        interpret=interpret,
        blocks=stack.blocks,
        gate=tiles.gate,
    )
    # As in the dense product, programs that use the same words run at the same time.
    columns = pl.cdiv(outputs, config.tile_n // call.halves)
    axes = {"split": 1, "band": bands, "column": columns, "row": band_tiles}
    if bands == 1:
        del axes["band"]
    arguments = Arguments(
        values,
        stack.words,
        stack.parameters,
        stack.table,
        stack.channel_scales,
        **scales_of_rows(x_scales, call),
        bias=None if tiles.bias is None else tiles.bias.astype(jnp.float32),
        row_weights=tiles.weights,
        experts=tiles.experts,
    )
    [found] = run_programs(
        call,
        arguments,
        jax.ShapeDtypeStruct((1, len(values), outputs), out_dtype),
        Grid(axes, call.warpgroups),
        f"experts_warpgroups_{format.codes}",
    )
    return found


def _joined(stack: Any) -> Any:
    """Reshapes a stack [experts, n, ...] to [experts · n, ...]."""
    return stack.reshape(-1, *stack.shape[2:])
