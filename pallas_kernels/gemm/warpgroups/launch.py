"""Fused dequantise-GEMM by warpgroups: the tensor cores don't wait for codes.

One warpgroup of a program only begins copies (`producer`). The others own 64 output channels each:
they decode a plane of codes into the registers that the tensor cores read, begin its product and
decode the next plane while the tensor cores are at work on this one or on another warpgroup's
(LiquidGEMM §5.2; `consumer`). They read the same tiles of x. Where outputs are few, warpgroups or
programs share them, each with a part of K and of x, and their sums meet on the chip (`epilogue`).

The scale of a group is applied to whichever are fewer: to the sums of few rows, or to decoded
weights, which are rounded to 16 bits. Those of whole output channels are left to the epilogue.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels.activations import QuantizedActivations
from mpjax.kernels.gemm.plans.configuration import ROWS, WarpgroupConfig
from mpjax.kernels.gemm.plans.shared_memory import stages
from mpjax.kernels.gemm.plans.warpgroup_rule import why_unsound
from mpjax.kernels.gemm.warpgroups.consumer import Consumer
from mpjax.kernels.gemm.warpgroups.epilogue import Epilogue
from mpjax.kernels.gemm.warpgroups.producer import produce
from mpjax.kernels.gemm.warpgroups.program import Arguments, Call, Program, Shared, shared_memory
from mpjax.kernels.mosaic.launch import Grid, give_registers, launch, take_registers
from mpjax.kernels.quantized_tensor import QuantizedTensor
from mpjax.kernels.target import tracing_for

# Of x, which the programs of a band of rows read again and again: a third of Hopper's L2 cache, for
# words and products pass through it, too. Twice as many are not worth reading the words twice.
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
    """Terms [splits, M, N] whose sum is x [M, K] · W [K, N]: float32, a single one in `out_dtype`.

    x is bfloat16 or float16, or QuantizedActivations where the format asks for them.
    `limits.why_not_warpgroups` says which weights W can't be. Programs that are a cluster add their
    splits themselves: there is one term.
    """
    values, x_scales = (x, None) if isinstance(x, jax.Array) else (x.values, x.scales)
    format, outputs = weight.format, weight.shape[1]
    rows, padding = values.shape[0], weight.padded_channels - values.shape[1]
    missing = -rows % ROWS if rows > ROWS else 0  # a single tile may stick out
    blocks = weight.padded_channels // format.block
    splits = min(config.splits, blocks)
    is_one_term = splits == 1 or config.is_cluster
    is_cluster = splits > 1 and config.is_cluster and not interpret  # which has no clusters
    # A warpgroup can turn tiles of floats alone, of 16 and 32 bits.
    is_turned = jnp.issubdtype(out_dtype, jnp.floating) and jnp.dtype(out_dtype).itemsize in (2, 4)
    dtype = jnp.dtype(out_dtype if is_turned and (splits == 1 or is_cluster) else jnp.float32)
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
    # The last one changes first: tiles that share words run at about the same time.
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
        *(() if x_scales is None else (jnp.pad(x_scales[:, 0], (0, -rows % config.tile_m)),)),
        out_shape=jax.ShapeDtypeStruct((axes.get("split", 1), rows + missing, outputs), dtype),
        grid=Grid(axes, config.warpgroups, cluster),
        scratch=shared_memory(call, weight.words.dtype, dtype),
        name=f"matmul_warpgroups_{format.codes}",
        interpret=interpret,
    )
    terms = terms[:, :rows]
    return terms.sum(0, keepdims=True).astype(out_dtype) if is_one_term else terms


def _kernel(call: Call, *references: Any, **shared: Any) -> None:
    x, words, parameters, *others, out = references
    table = others.pop(0) if call.kind.has_table else None
    channel_scales = others.pop(0) if call.kind.has_channel_scales else None
    x_scales = others.pop() if others else None
    arguments = Arguments(x, words, parameters, table, channel_scales, x_scales, out)
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
