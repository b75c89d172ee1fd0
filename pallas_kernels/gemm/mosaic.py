"""Fused dequantise-GEMM by warpgroups, for many rows: the tensor cores don't wait for codes.

One warpgroup of a program only begins copies. The others own 64 output channels each: they decode a
plane of codes into the registers that `wgmma` reads, begin its product and decode the next plane
while the tensor cores are at work on this one or on another warpgroup's (LiquidGEMM §5.2). All of
them read the same tiles of x.

Scales of groups are applied to decoded weights, which are rounded to 16 bits: here are more outputs
than weights. Those of whole output channels are left to the epilogue.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import backend, mosaic
from pallas_kernels import codes as code_kinds
from pallas_kernels.formats import WeightFormat
from pallas_kernels.gemm.config import CHANNELS, ROWS, WarpgroupConfig
from pallas_kernels.quantized_tensor import QuantizedTensor

WORD_STAGES = 2  # blocks of words on their way or in use
MOST_STAGES = 8  # planes' tiles of x, likewise
MOST_OUT_ROWS = 64  # of a tile on its way out


@functools.partial(jax.jit, static_argnames=("config", "out_dtype", "interpret"))
def matmul_terms(
    x: jax.Array,
    weight: QuantizedTensor,
    config: WarpgroupConfig,
    out_dtype: jnp.dtype,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Terms [splits, M, N] whose sum is x [M, K] · W [K, N]: float32, a single one in `out_dtype`.

    x is bfloat16 or float16. `limits.why_not_warpgroups` says which weights W can't be.
    """
    format, outputs = weight.format, weight.shape[1]
    rows, padding = x.shape[0], weight.padded_channels - x.shape[1]
    missing = -rows % ROWS
    blocks = weight.padded_channels // format.block
    splits = min(config.splits, blocks)
    tile_n = CHANNELS * config.warpgroups
    # A warpgroup can turn tiles of floats alone, of 16 and 32 bits.
    is_turned = jnp.issubdtype(out_dtype, jnp.floating) and jnp.dtype(out_dtype).itemsize in (2, 4)
    dtype = jnp.dtype(out_dtype if splits == 1 and is_turned else jnp.float32)
    stages = x_stages(format, config, dtype)
    assert stages >= 2, "a tile of x is free when the product with the next one has begun"
    out_rows = math.gcd(config.tile_m, MOST_OUT_ROWS)
    sum_tiles = (config.warpgroups, CHANNELS, config.tile_m)
    terms = mosaic.launch(
        functools.partial(
            _kernel,
            format=format,
            scale_dtype=weight.scale_dtype,
            config=config,
            splits=splits,
            interpret=interpret,
        ),
        jnp.pad(x, ((0, missing), (0, padding))) if missing or padding else x,
        weight.words,
        weight.parameters,
        out_shape=jax.ShapeDtypeStruct((splits, rows + missing, outputs), dtype),
        # The last one changes first: tiles that share words run at about the same time.
        grid={
            "split": splits,
            "column": pl.cdiv(outputs, tile_n),
            "row": pl.cdiv(rows, config.tile_m),
        },
        warpgroups=config.warpgroups,
        scratch={
            "x_tiles": mosaic.shared((stages, config.tile_m, format.plane_width), x.dtype),
            "word_tiles": mosaic.shared((WORD_STAGES, tile_n, format.plane_width), jnp.uint16),
            "parameter_tiles": mosaic.shared_rows(
                (WORD_STAGES, format.groups_of_block, tile_n), jnp.uint32
            ),
            "out_tiles": mosaic.shared((config.warpgroups, out_rows, CHANNELS), dtype),
            "x_full": mosaic.Barrier(num_barriers=stages),
            "x_free": mosaic.Barrier(num_arrivals=config.warpgroups, num_barriers=stages),
            "words_full": mosaic.Barrier(num_arrivals=2, num_barriers=WORD_STAGES),
            "words_free": mosaic.Barrier(num_arrivals=config.warpgroups, num_barriers=WORD_STAGES),
            **({"sum_tiles": mosaic.shared_rows(sum_tiles, jnp.float32)} if interpret else {}),
        },
        name=f"matmul_warpgroups_{format.codes}",
        interpret=interpret,
    )
    terms = terms[:, :rows]
    return terms if splits > 1 else terms.astype(out_dtype)


def x_stages(format: WeightFormat, config: WarpgroupConfig, dtype: jnp.dtype) -> int:
    """How many planes' tiles of x shared memory has room for: 0, or a power of two.

    So a tile's place is found without a division.
    """
    tile_n = CHANNELS * config.warpgroups
    words = WORD_STAGES * tile_n * (2 * format.plane_width + 4 * format.groups_of_block)
    out = math.gcd(config.tile_m, MOST_OUT_ROWS) * tile_n * dtype.itemsize
    room = mosaic.SHARED_BYTES - words - out - mosaic.BARRIER_BYTES
    fitting = max(0, room // (2 * config.tile_m * format.plane_width))
    return min(MOST_STAGES, 1 << fitting.bit_length() - 1) if fitting else 0


def _kernel(
    x_ref: Any,  # [M, K padded]
    words_ref: Any,  # [K blocks, N, plane width]
    parameters_ref: Any,  # [groups, N]
    out_ref: Any,  # [splits, M, N]
    *,
    x_tiles: Any,  # [stages, tile_m, plane width]
    word_tiles: Any,  # [stages, tile_n, plane width]
    parameter_tiles: Any,  # [stages, groups of a block, tile_n]
    out_tiles: Any,  # [warpgroups, rows, 64]
    x_full: Any,
    x_free: Any,
    words_full: Any,
    words_free: Any,
    sum_tiles: Any = None,  # [warpgroups, 64, tile_m], where the kernel is interpreted
    format: WeightFormat,
    scale_dtype: str,
    config: WarpgroupConfig,
    splits: int,
    interpret: bool,
) -> None:
    warpgroup = jax.lax.axis_index("warpgroup")
    split = jax.lax.axis_index("split")
    stages, tile_m, width = x_tiles.shape
    groups, tile_n = parameter_tiles.shape[1:]
    blocks, planes, has_one_group = words_ref.shape[0], format.planes, format.group_size is None
    first_row = jax.lax.axis_index("row") * tile_m
    first_output = jax.lax.axis_index("column") * tile_n
    first, last = split * blocks // splits, (split + 1) * blocks // splits

    @pl.when(warpgroup == config.warpgroups)
    def _copy() -> None:
        mosaic.give_registers()

        def copy(block: jax.Array, _: None) -> None:
            number = block - first
            stage = jax.lax.rem(number, WORD_STAGES)
            pl.when(number >= WORD_STAGES)(lambda: mosaic.wait(words_free.at[stage]))
            outputs, full = pl.ds(first_output, tile_n), words_full.at[stage]
            mosaic.copy_in(words_ref.at[block, outputs, :], word_tiles.at[stage], full)
            # A group of all channels comes with every block: so there is nothing special about it.
            rows = pl.ds(0 if has_one_group else block * groups, groups)
            mosaic.copy_in(parameters_ref.at[rows, outputs], parameter_tiles.at[stage], full)
            for plane in range(planes):
                step = number * planes + plane
                stage = jax.lax.rem(step, stages)
                pl.when(step >= stages)(functools.partial(mosaic.wait, x_free.at[stage]))
                channels = pl.ds((block * planes + plane) * width, width)
                tile = x_ref.at[pl.ds(first_row, tile_m), channels]
                mosaic.copy_in(tile, x_tiles.at[stage], x_full.at[stage])

        jax.lax.fori_loop(first, last, copy, None)

    @pl.when(warpgroup < config.warpgroups)
    def _compute() -> None:
        mosaic.take_registers(config.warpgroups)
        own = pl.ds(warpgroup * CHANNELS, CHANNELS)
        kind, operand = code_kinds.of(format), x_ref.dtype

        def decoder(words: jax.Array, row: jax.Array) -> Callable[[int], jax.Array]:
            group, ptx = kind.load(row, scale_dtype, operand), not interpret
            if has_one_group:
                return kind.decoder([words], group.arguments, (), operand, ptx=ptx)
            return kind.scaled_decoder([words], group, (), operand, ptx=ptx)

        def multiply(sums: Any) -> jax.Array:
            def step(block: jax.Array, _: None) -> None:
                number = block - first
                word_stage = jax.lax.rem(number, WORD_STAGES)
                mosaic.wait(words_full.at[word_stage])
                words = mosaic.load(word_tiles.at[word_stage, own, :], interpret=interpret)
                rows = [
                    mosaic.load_row(parameter_tiles.at[word_stage, group, own], interpret=interpret)
                    for group in range(groups)
                ]
                mosaic.arrive(words_free.at[word_stage])
                decoders = [decoder(words, row) for row in rows]
                for plane in range(planes):
                    number_of_x = number * planes + plane
                    stage = jax.lax.rem(number_of_x, stages)
                    weights = decoders[plane * groups // planes](plane)
                    mosaic.wait(x_full.at[stage])
                    mosaic.multiply(sums, weights, x_tiles.at[stage], interpret=interpret)
                    # The product before this one is done when no more than this one is at work.
                    mosaic.wait_for_products(1)
                    before = jax.lax.rem(number_of_x + stages - 1, stages)
                    pl.when(number_of_x > 0)(functools.partial(mosaic.arrive, x_free.at[before]))

            jax.lax.fori_loop(first, last, step, None)
            mosaic.wait_for_products(0)
            return sums[...]

        with backend.decoding_with(mosaic.WgmmaDecoding(width)):
            scratch = None if sum_tiles is None else sum_tiles.at[warpgroup]
            sums = mosaic.accumulate((CHANNELS, tile_m), multiply, scratch)
        if has_one_group:
            row = parameter_tiles.at[0, 0, own]  # as in every stage
            with backend.decoding_with(mosaic.WgmmaDecoding(tile_m)):
                row = mosaic.load_row(row, interpret=interpret)
                scale = kind.load(row, scale_dtype, operand).scale
            assert scale is not None
            sums *= scale
        elif exponent := kind.scaled_exponent(operand, ptx=not interpret):
            sums *= 2.0**-exponent
        tile = out_tiles.at[warpgroup]
        for row in range(0, tile_m, tile.shape[0]):
            mosaic.wait_for_stores()
            part = sums[:, row : row + tile.shape[0]].astype(out_ref.dtype)
            mosaic.store_transposed(tile, part, interpret=interpret)
            target = out_ref.at[
                split,
                pl.ds(first_row + row, tile.shape[0]),
                pl.ds(first_output + warpgroup * CHANNELS, CHANNELS),
            ]
            mosaic.copy_out(tile, target)
        mosaic.wait_for_stores()
