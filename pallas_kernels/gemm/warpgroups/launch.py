"""Fused dequantise-GEMM by warpgroups, in which tensor cores multiply while weights are decoded.

A program has one producer warpgroup, which only begins copies (`producer`), and some consumers
(`consumer`), each with 64 output channels; with JAX 0.12, the first consumer begins the copies of
tiles of many rows. A consumer decodes a plane of codes into registers as an operand of the tensor
cores, begins its product, and decodes the next plane while the tensor cores multiply this one or
another consumer's (LiquidGEMM §5.2). All consumers use the same tiles of x. If there are few
outputs, several consumers or programs share them, each with a part of K and of x, and their sums
are added on the chip (`epilogue`).

With few rows, or 8-bit x, the scale of a group multiplies the sums, otherwise the decoded weights,
which are rounded to 16 bits: whichever are fewer. Scales of whole output channels are applied in
the epilogue.
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

# The bytes of x in a band of rows, which its programs read repeatedly from the L2 cache. This is a
# third of Hopper's cache, through which words and products also pass. Every band reads all words
# once more, so a band may have up to twice as many bytes before it is divided.
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

    Several terms are float32; a single term has `out_dtype`. If the programs of a tile form a
    cluster, they add their splits, and there is a single term.

    x: bfloat16 or float16, or QuantizedActivations if the format has 8-bit activations.
    weight: accepted by `limits.why_not_warpgroups`.
    """
    values, x_scales = (x, None) if isinstance(x, jax.Array) else (x.values, x.scales)
    format, outputs = weight.format, weight.shape[1]
    rows, padding = values.shape[0], weight.padded_channels - values.shape[1]
    # Pallas tiles arrays in memory by ROW_MULTIPLE rows. A single tile may extend beyond x instead.
    missing = -rows % ROW_MULTIPLE if rows > ROW_MULTIPLE else 0
    blocks = weight.padded_channels // format.block
    splits = min(config.splits, blocks)
    is_one_term = splits == 1 or config.is_cluster
    is_cluster = splits > 1 and config.is_cluster and not interpret  # none in interpret mode
    dtype = _written(out_dtype) if splits == 1 or is_cluster else jnp.dtype(jnp.float32)
    assert why_unsound(config, format) is None
    x_bytes = rows * weight.padded_channels * values.dtype.itemsize
    bands, band_tiles = bands_of(pl.cdiv(rows, config.tile_m), x_bytes)
    call = Call(
        format=format,
        scale_dtype=weight.scale_dtype,
        config=config,
        splits=splits,
        stages=stages(format, config, dtype),
        operand=values.dtype,
        sum_dtype=jnp.dtype(jnp.int32 if values.dtype == jnp.int8 else jnp.float32),
        axis="split" if is_cluster else None,
        band_tiles=band_tiles if bands > 1 else None,
        interpret=interpret,
    )
    arguments = Arguments(
        jnp.pad(values, ((0, missing), (0, padding))) if missing or padding else values,
        weight.words,
        weight.parameters,
        None if weight.table is None else weight.table.astype(jnp.float32),
        weight.channel_scales,
        **scales_of_rows(x_scales, call),
    )
    terms = run_programs(
        call,
        arguments,
        jax.ShapeDtypeStruct((1 if is_cluster else splits, rows + missing, outputs), dtype),
        _grid(call, bands, pl.cdiv(outputs, config.tile_n), band_tiles),
        f"matmul_warpgroups_{format.codes}",
    )
    terms = terms[:, :rows]
    return terms.sum(0, keepdims=True).astype(out_dtype) if is_one_term else terms


def _written(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype in which a program stores a product for which `dtype` is wanted.

    A warpgroup can transpose only tiles of 16-bit and 32-bit floats before storing them.
    """
    dtype = jnp.dtype(dtype)
    can_write = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize in (2, 4)
    return dtype if can_write else jnp.dtype(jnp.float32)


def _grid(call: Call, bands: int, columns: int, band_tiles: int) -> Grid:
    """The programs of a product. The last axis varies fastest.

    So programs that use the same words run at the same time.
    """
    axes = {"column": columns, "row": band_tiles}
    if bands > 1:
        axes = {"band": bands, **axes}
    if call.axis is not None:
        return Grid(axes, call.warpgroups, {call.axis: call.splits})
    return Grid({"split": call.splits, **axes}, call.warpgroups, {})


def bands_of(tiles: int, nbytes: int) -> tuple[int, int]:
    """The number of bands of rows, and the tiles of rows in each; the last may have fewer.

    nbytes: of all rows of x.
    """
    band_tiles = pl.cdiv(tiles, max(1, nbytes // BAND_BYTES))
    return pl.cdiv(tiles, band_tiles), band_tiles


def scales_of_rows(x_scales: jax.Array | None, call: Call) -> dict[str, jax.Array]:
    """The field of `Arguments` for the scales of x, [M, 1] or [M, K blocks], if there are any.

    They are padded to whole tiles of rows.
    """
    if x_scales is None:
        return {}
    missing = -len(x_scales) % call.config.tile_m
    if call.scales_x_blocks:
        return {"x_block_scales": jnp.pad(x_scales.T, ((0, 0), (0, missing)))}
    return {"x_scales": jnp.pad(x_scales[:, 0], (0, missing))}


def run_programs(
    call: Call, arguments: Arguments, out: jax.ShapeDtypeStruct, grid: Grid, name: str
) -> jax.Array:
    """Launches the programs of a product; `arguments` are arrays, without an output."""
    given = {field: array for field, array in arguments._asdict().items() if array is not None}
    return launch(
        functools.partial(_kernel, call, tuple(given)),
        *given.values(),
        out_shape=out,
        grid=grid,
        scratch=shared_memory(call, arguments.words.dtype, out.dtype),
        name=name,
        interpret=call.interpret,
    )


def _kernel(call: Call, fields: tuple[str, ...], *references: Any, **shared: Any) -> None:
    arguments = Arguments(**dict(zip((*fields, "out"), references, strict=True)))
    program = Program.here(call, arguments, Shared(**shared))
    is_used = program.is_used
    if is_used is None:
        _run(program)
    else:
        pl.when(is_used)(functools.partial(_run, program))


def _run(program: Program) -> None:
    call, warpgroup, config = program.call, program.warpgroup, program.call.config

    def consume() -> None:
        share: Any = 0 if config.shares == 1 else warpgroup // call.columns
        column = warpgroup if config.shares == 1 else jax.lax.rem(warpgroup, call.columns)
        with tracing_for(program.target):
            consumer = Consumer(program, column, share)
            Epilogue(program, consumer, column, share).run(consumer.run())

    if not call.has_producer:
        consume()
        return

    @pl.when(warpgroup == config.warpgroups)
    def _produce() -> None:
        give_registers()
        produce(program)

    @pl.when(warpgroup < config.warpgroups)
    def _consume() -> None:
        take_registers(config.warpgroups)
        consume()
