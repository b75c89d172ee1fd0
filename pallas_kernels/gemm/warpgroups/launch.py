"""Fused dequantise-GEMM by warpgroups, in which tensor cores multiply while weights are decoded.

A program has one producer warpgroup, which only begins copies (`producer`), and some consumers
(`consumer`), each with 64 output channels. A consumer decodes a plane of codes into the registers
that tensor cores read, begins its product, and decodes the next plane while the tensor cores
multiply this one or another consumer's (LiquidGEMM §5.2). All consumers read the same tiles of x.
If there are few outputs, several consumers or programs share them, each with a part of K and of x,
and their sums are added on the chip (`epilogue`).

With few rows, or 8-bit x, the scale of a group multiplies the sums, else the decoded weights, which
are rounded to 16 bits: whichever are fewer. Scales of whole output channels are left to the
epilogue.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels.activations import QuantizedActivations
from mpjax.kernels.gemm.plans.configuration import ROW_MULTIPLE, WarpgroupConfig
from mpjax.kernels.gemm.plans.shared_memory import stages
from mpjax.kernels.gemm.plans.warpgroup_rule import why_unsound
from mpjax.kernels.gemm.warpgroups.consumer import Consumer
from mpjax.kernels.gemm.warpgroups.epilogue import Epilogue
from mpjax.kernels.gemm.warpgroups.producer import produce
from mpjax.kernels.gemm.warpgroups.program import Arguments, Call, Program, Shared, shared_memory
from mpjax.kernels.mosaic.launch import Grid, give_registers, launch, take_registers
from mpjax.kernels.quantized_tensor import QuantizedTensor
from mpjax.kernels.target import tracing_for

# The bytes of x in a band of rows, which its programs read again and again from the L2 cache. This
# is a third of Hopper's cache, which words and products pass through as well. Every band reads all
# words once more; therefore a band may have up to twice as many bytes before it is divided.
BAND_BYTES = 2**24


@functools.partial(jax.jit, static_argnames=("config", "out_dtype", "interpret"))
def matmul_terms(
    x: jax.Array | QuantizedActivations,
    weight: QuantizedTensor,
    config: WarpgroupConfig,
    out_dtype: jnp.dtype,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Terms [splits, M, N] whose sum over the first axis is x [M, K] · W [K, N].

    Several terms are float32; a single term has `out_dtype`. If the programs of a tile are a
    cluster, they add their splits, and there is a single term.

    x: bfloat16 or float16, or QuantizedActivations if the format has 8-bit activations.
    weight: one that `limits.why_not_warpgroups` does not refuse.
    """
    values, x_scales = (x, None) if isinstance(x, jax.Array) else (x.values, x.scales)
    format, outputs = weight.format, weight.shape[1]
    rows, padding = values.shape[0], weight.padded_channels - values.shape[1]
    # Pallas tiles arrays in memory by ROW_MULTIPLE rows. A single tile may reach beyond x instead.
    missing = -rows % ROW_MULTIPLE if rows > ROW_MULTIPLE else 0
    blocks = weight.padded_channels // format.block
    splits = min(config.splits, blocks)
    is_one_term = splits == 1 or config.is_cluster
    is_cluster = splits > 1 and config.is_cluster and not interpret  # there are none in interpret
    # A warpgroup can transpose only tiles of 16-bit and 32-bit floats, to write them out.
    is_floating = jnp.issubdtype(out_dtype, jnp.floating)
    can_write = is_floating and jnp.dtype(out_dtype).itemsize in (2, 4)
    dtype = jnp.dtype(out_dtype if can_write and (splits == 1 or is_cluster) else jnp.float32)
    assert why_unsound(config, format) is None
    tiles = pl.cdiv(rows, config.tile_m)
    bands = rows * weight.padded_channels * values.dtype.itemsize // BAND_BYTES
    band_tiles = pl.cdiv(tiles, max(1, bands))
    call = Call(
        format=format,
        scale_dtype=weight.scale_dtype,
        config=config,
        splits=splits,
        stages=stages(format, config, dtype),
        operand=values.dtype,
        sum_dtype=jnp.dtype(jnp.int32 if values.dtype == jnp.int8 else jnp.float32),
        axis="split" if is_cluster else None,
        band_tiles=band_tiles if band_tiles < tiles else None,
        interpret=interpret,
    )
    # The last axis varies fastest, so that programs that read the same words run at the same time.
    axes = {"column": pl.cdiv(outputs, config.tile_n), "row": band_tiles}
    if band_tiles < tiles:
        axes = {"band": pl.cdiv(tiles, band_tiles), **axes}
    cluster = {"split": splits} if is_cluster else {}
    if not is_cluster:
        axes = {"split": splits, **axes}
    terms = launch(
        functools.partial(_kernel, call),
        jnp.pad(values, ((0, missing), (0, padding))) if missing or padding else values,
        weight.words,
        weight.parameters,
        *(() if weight.table is None else (weight.table.astype(jnp.float32),)),
        *(() if weight.channel_scales is None else (weight.channel_scales,)),
        *(() if x_scales is None else (_padded_scales(x_scales, call),)),
        out_shape=jax.ShapeDtypeStruct((axes.get("split", 1), rows + missing, outputs), dtype),
        grid=Grid(axes, config.warpgroups, cluster),
        scratch=shared_memory(call, weight.words.dtype, dtype),
        name=f"matmul_warpgroups_{format.codes}",
        interpret=interpret,
    )
    terms = terms[:, :rows]
    return terms.sum(0, keepdims=True).astype(out_dtype) if is_one_term else terms


def _padded_scales(x_scales: jax.Array, call: Call) -> jax.Array:
    """The scales of x [M, 1] or [M, K blocks] for whole tiles of rows: [M'] or [K blocks, M']."""
    missing = -len(x_scales) % call.config.tile_m
    if call.scales_x_blocks:
        return jnp.pad(x_scales.T, ((0, 0), (0, missing)))
    return jnp.pad(x_scales[:, 0], (0, missing))


def _kernel(call: Call, *references: Any, **shared: Any) -> None:
    x, words, parameters, *others, out = references
    table = others.pop(0) if call.kind.has_table else None
    channel_scales = others.pop(0) if call.kind.has_channel_scales else None
    x_scales = others.pop() if others else None
    of_blocks = None
    if call.scales_x_blocks:
        x_scales, of_blocks = None, x_scales
    arguments = Arguments(x, words, parameters, table, channel_scales, x_scales, of_blocks, out)
    program = Program.here(call, arguments, Shared(**shared))
    if call.band_tiles is None:
        _run(program)
    else:  # the last band may have fewer tiles
        pl.when(program.first_row < out.shape[1])(functools.partial(_run, program))


def _run(program: Program) -> None:
    call, warpgroup, config = program.call, program.warpgroup, program.call.config

    @pl.when(warpgroup == config.warpgroups)
    def _produce() -> None:
        give_registers()
        produce(program)

    @pl.when(warpgroup < config.warpgroups)
    def _consume() -> None:
        take_registers(config.warpgroups)
        share: Any = 0 if config.shares == 1 else warpgroup // call.columns
        column = warpgroup if config.shares == 1 else jax.lax.rem(warpgroup, call.columns)
        with tracing_for(program.target):
            consumer = Consumer(program, column, share)
            Epilogue(program, consumer, column, share).run(consumer.run())
