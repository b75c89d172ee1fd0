"""Fused dequantise-GEMM by warpgroups: the tensor cores don't wait for codes.

One warpgroup of a program only begins copies. The others own 64 output channels each: they decode a
plane of codes into the registers that the tensor cores read, begin its product and decode the next
plane while the tensor cores are at work on this one or on another warpgroup's (LiquidGEMM §5.2).
They read the same tiles of x. Where outputs are few, warpgroups or programs share them, each with a
part of K and of x, and the first one adds what the others send to its shared memory.

The scale of a group is applied to whichever are fewer: to the sums of few rows, or to decoded
weights, which are rounded to 16 bits. Those of whole output channels are left to the epilogue.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import backend, mosaic, mosaic_decoding
from pallas_kernels import codes as code_kinds
from pallas_kernels.activations import QuantizedActivations
from pallas_kernels.formats import WeightFormat
from pallas_kernels.gemm import epilogue
from pallas_kernels.gemm.config import CHANNELS, ROWS, WarpgroupConfig
from pallas_kernels.gemm.stages import Stages, stages
from pallas_kernels.gemm.warpgroups import why_unsound
from pallas_kernels.quantized_tensor import QuantizedTensor


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
    tile_n, columns = config.tile_n, config.warpgroups // config.shares
    # A warpgroup can turn tiles of floats alone, of 16 and 32 bits.
    is_turned = jnp.issubdtype(out_dtype, jnp.floating) and jnp.dtype(out_dtype).itemsize in (2, 4)
    dtype = jnp.dtype(out_dtype if is_turned and (splits == 1 or is_cluster) else jnp.float32)
    assert why_unsound(config, format) is None
    staged = stages(format, config, dtype)
    has_groups = format.group_size is not None
    copies = 1 + has_groups + (staged.parts == 1)  # of words, their parameters, and x
    sum_dtype = jnp.dtype(jnp.int32 if values.dtype == jnp.int8 else jnp.float32)
    slots, x_slots = staged.blocks * config.shares, staged.x * config.shares
    # The last one changes first: tiles that share words run at about the same time.
    grid = {"column": pl.cdiv(outputs, tile_n), "row": pl.cdiv(rows, config.tile_m)}
    cluster = {"split": splits} if is_cluster else {}
    if not is_cluster:
        grid = {"split": splits, **grid}
    scratch = {
        "x_tiles": mosaic.shared(
            (x_slots, config.tile_m, format.block // staged.parts),
            values.dtype,
            columns=format.plane_width,
        ),
        "word_tiles": mosaic.shared(
            (slots, tile_n, format.columns * format.plane_width),
            weight.words.dtype,
            columns=format.plane_width,
        ),
        "out_tiles": mosaic.shared((columns, staged.out_rows, CHANNELS), dtype),
        "full": mosaic.Barrier(num_arrivals=copies, num_barriers=slots),
        "free": mosaic.Barrier(num_arrivals=columns, num_barriers=slots),
    }
    if has_groups:
        shape = slots, format.parameters_of_block, tile_n
        scratch["parameter_tiles"] = mosaic.shared_rows(shape, jnp.uint32)
    if staged.parts > 1:
        scratch["x_full"] = mosaic.Barrier(num_barriers=x_slots)
        scratch["x_free"] = mosaic.Barrier(num_arrivals=columns, num_barriers=x_slots)
    scratch |= epilogue.scratch(config, sum_dtype, is_cluster=is_cluster)
    if weight.table is not None and not interpret:
        scratch["pair_rows"] = mosaic_decoding.shared_rows_of_pairs(format.bits)
        scratch["filled"] = mosaic.Barrier(num_arrivals=config.warpgroups)
    if interpret:
        shape = config.warpgroups, CHANNELS, config.tile_m
        scratch["sum_tiles"] = mosaic.shared_rows(shape, sum_dtype)
    terms = mosaic.launch(
        functools.partial(
            _kernel,
            format=format,
            scale_dtype=weight.scale_dtype,
            config=config,
            splits=splits,
            staged=staged,
            sum_dtype=sum_dtype,
            cluster_axis="split" if is_cluster else None,
            interpret=interpret,
        ),
        jnp.pad(values, ((0, missing), (0, padding))) if missing or padding else values,
        weight.words,
        weight.parameters,
        *(() if weight.table is None else (weight.table.astype(jnp.float32),)),
        *(() if weight.channel_scales is None else (weight.channel_scales,)),
        *(() if x_scales is None else (jnp.pad(x_scales[:, 0], (0, -rows % config.tile_m)),)),
        out_shape=jax.ShapeDtypeStruct((grid.get("split", 1), rows + missing, outputs), dtype),
        grid=grid,
        cluster=cluster,
        warpgroups=config.warpgroups,
        scratch=scratch,
        name=f"matmul_warpgroups_{format.codes}",
        interpret=interpret,
    )
    terms = terms[:, :rows]
    return terms.sum(0, keepdims=True).astype(out_dtype) if is_one_term else terms


def _kernel(
    x_ref: Any,  # [M, K padded]
    words_ref: Any,  # [K blocks, N, columns · plane width], or a plain matrix [1, N, K padded]
    parameters_ref: Any,  # [words of parameters, N]
    *references: Any,  # table [2**bits], scales [N] and [M], where there are; output [splits, M, N]
    x_tiles: Any,  # [slots, tile_m, planes · plane width]
    word_tiles: Any,  # [slots, tile_n, columns · plane width]
    out_tiles: Any,  # [columns of 64 outputs, rows, 64]
    full: Any,
    free: Any,
    parameter_tiles: Any = None,  # [slots, words of a block, tile_n], where there are groups
    x_full: Any = None,  # where a tile of x is less than a block
    x_free: Any = None,
    pair_rows: Any = None,  # where codes index a table
    filled: Any = None,
    sum_tiles: Any = None,  # [warpgroups, 64, tile_m], where the kernel is interpreted
    format: WeightFormat,
    scale_dtype: str,
    config: WarpgroupConfig,
    splits: int,
    staged: Stages,
    sum_dtype: jnp.dtype,
    cluster_axis: str | None,
    interpret: bool,
    **joining: Any,  # of the epilogue
) -> None:
    *others, out_ref = references
    kind = code_kinds.of(format)
    table_ref = others.pop(0) if kind.has_table else None
    channels_ref = [others.pop(0)] if kind.has_channel_scales else []  # one or none
    x_scales_ref = others  # likewise
    warpgroup, split = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("split")
    tile_m, width = x_tiles.shape[1], format.plane_width
    parameter_words, tile_n = format.parameters_of_block, word_tiles.shape[1]
    columns, shares = out_tiles.shape[0], config.shares
    blocks, planes = x_ref.shape[1] // format.block, format.planes
    if has_one_group := format.group_size is None:
        channels_ref = [parameters_ref.at[0]]
    scales_groups = kind.has_group_scales and not has_one_group
    parts = staged.parts
    first_row = jax.lax.axis_index("row") * tile_m
    first_output = jax.lax.axis_index("column") * tile_n
    first, last = split * blocks // splits, (split + 1) * blocks // splits

    def slot(share: Any, number: jax.Array, count: int) -> jax.Array:
        place = jax.lax.rem(number, count)
        return place if shares == 1 else share * count + place

    @pl.when(warpgroup == config.warpgroups)
    def _copy() -> None:
        mosaic.give_registers()

        def copy(number: jax.Array, share: int) -> None:
            block = first + number * shares + share
            place = slot(share, number, staged.blocks)
            pl.when(number >= staged.blocks)(lambda: mosaic.wait(free.at[place]))
            outputs, arrival = pl.ds(first_output, tile_n), full.at[place]
            words = words_ref.at[block, outputs, :]
            if format.is_flat:
                words = words_ref.at[0, outputs, pl.ds(block * width, width)]
            mosaic.copy_in(words, word_tiles.at[place], arrival)
            if not has_one_group:
                rows = pl.ds(block * parameter_words, parameter_words)
                parameters = parameters_ref.at[rows, outputs]
                mosaic.copy_in(parameters, parameter_tiles.at[place], arrival)
            for part in range(parts):
                if parts > 1:
                    step = number * parts + part
                    place = slot(share, step, staged.x)
                    pl.when(step >= staged.x)(functools.partial(mosaic.wait, x_free.at[place]))
                    arrival = x_full.at[place]
                size = format.block // parts
                channels = pl.ds((block * parts + part) * size, size)
                x = x_ref.at[pl.ds(first_row, tile_m), channels]
                mosaic.copy_in(x, x_tiles.at[place], arrival)

        def copy_of_all(number: jax.Array, _: None) -> None:
            copy(number, 0)  # the first share has the most
            for share in range(1, shares):
                is_there = first + number * shares + share < last
                pl.when(is_there)(functools.partial(copy, number, share))

        jax.lax.fori_loop(0, pl.cdiv(last - first, shares), copy_of_all, None)

    @pl.when(warpgroup < config.warpgroups)
    def _compute() -> None:
        mosaic.take_registers(config.warpgroups)
        share = 0 if shares == 1 else warpgroup // columns
        column = warpgroup if shares == 1 else jax.lax.rem(warpgroup, columns)
        own = pl.ds(column * CHANNELS, CHANNELS)
        operand = x_ref.dtype
        scratch = None if sum_tiles is None else sum_tiles.at[warpgroup]
        count = pl.cdiv(last - first - share, shares)

        # What sticks out reads what it does not need.
        output = first_output + column * CHANNELS
        output = jnp.minimum(output, words_ref.shape[1] - CHANNELS)
        of_channels = [
            mosaic.load_row(ref.at[pl.ds(output, CHANNELS)], interpret=interpret)
            for ref in channels_ref
        ]

        def load(number: jax.Array) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
            place = slot(share, number, staged.blocks)
            mosaic.wait(full.at[place])
            words = [
                mosaic.load(word_tiles.at[place, own, pl.ds(first, width)], interpret=interpret)
                for first in range(0, format.columns * width, width)
            ]
            if has_one_group:
                return place, words, of_channels
            rows = [
                mosaic.load_row(parameter_tiles.at[place, word, own], interpret=interpret)
                for word in range(parameter_words)
            ]
            return place, words, rows

        def decoders(
            words: list[jax.Array], rows: list[jax.Array], *, scaled: bool
        ) -> list[Callable[[], jax.Array]]:
            def of_group(row: jax.Array) -> code_kinds.Decoder:
                group, ptx = kind.load(row, scale_dtype, operand), not interpret
                if scaled:
                    return kind.scaled_decoder(words, group, shared, operand, ptx=ptx)
                return kind.decoder(words, group.arguments, shared, operand, ptx=ptx)

            decode = [of_group(row) for row in rows]
            return [
                functools.partial(decode[plane * parameter_words // planes], plane)
                for plane in range(planes)
            ]

        pairs = None
        if pair_rows is not None:
            pairs = mosaic_decoding.Pairs(pair_rows, filled, config.warpgroups)
        with backend.decoding_with(mosaic_decoding.WgmmaDecoding(width, pairs)):
            shared = kind.shared(table_ref, operand, ptx=not interpret)

        def scaled(sums: jax.Array, row: jax.Array) -> jax.Array:
            with backend.decoding_with(mosaic_decoding.WgmmaDecoding(sums.shape[1])):
                if kind.has_channel_scales:
                    return sums * backend.column(row)
                scale = kind.load(row, scale_dtype, operand).scale
            assert scale is not None
            return sums * scale

        def sum_of_few_rows() -> jax.Array:
            now = config.multiplies_now(looks_up=kind.has_table)
            product = functools.partial(mosaic.product, now=now, scratch=scratch)
            sums_of_block = parameter_words if scales_groups else 1
            joined = planes // sums_of_block

            def go_on(number: jax.Array, sums: jax.Array) -> jax.Array:
                place, words, rows = load(number)
                operands = decoders(words, rows, scaled=False)
                tiles = [x_tiles.at[place, :, pl.ds(p * width, width)] for p in range(planes)]
                for group in range(sums_of_block):
                    run = slice(group * joined, (group + 1) * joined)
                    term = product(operands[run], tiles[run], sum_dtype)
                    sums = sums + (scaled(term, rows[group]) if scales_groups else term)
                mosaic.arrive(free.at[place])
                return sums

            nothing = mosaic.zeros((CHANNELS, tile_m), sum_dtype, interpret=interpret)
            return jax.lax.fori_loop(0, count, go_on, nothing)

        def sum_of_planes(sums: Any) -> list[jax.Array]:
            def go_on(number: jax.Array, _: None) -> None:
                place, words, rows = load(number)
                mosaic.arrive(free.at[place])
                for plane, decode in enumerate(decoders(words, rows, scaled=scales_groups)):
                    step = number * planes + plane
                    place = slot(share, step, staged.x)
                    weights = decode()
                    mosaic.wait(x_full.at[place])
                    mosaic.multiply(sums, weights, x_tiles.at[place], interpret=interpret)
                    free_before(step, x_free, staged.x)

            jax.lax.fori_loop(0, count, go_on, None)
            mosaic.wait_for_products(0)
            return [sums[...]]

        def sums_of_blocks(*sums: Any) -> list[jax.Array]:
            def go_on(number: jax.Array, _: None) -> None:
                if format.is_flat:
                    place = slot(share, number, staged.blocks)
                    mosaic.wait(full.at[place])
                    operands = [lambda: word_tiles.at[place, own, :]]
                else:
                    place, words, rows = load(number)
                    operands = decoders(words, rows, scaled=False)
                for plane, decode in enumerate(operands):
                    weights, row = decode(), 0
                    for part in sums:
                        x_rows, channels = pl.ds(row, part.shape[1]), pl.ds(plane * width, width)
                        x = x_tiles.at[place, x_rows, channels]
                        mosaic.multiply(part, weights, x, interpret=interpret)
                        row += part.shape[1]
                    if plane == 0:
                        free_before(number, free, staged.blocks, len(sums))
                    else:
                        mosaic.wait_for_products(len(sums))

            jax.lax.fori_loop(0, count, go_on, None)
            mosaic.wait_for_products(0)
            return [part[...] for part in sums]

        def free_before(step: jax.Array, barriers: Any, slots: int, products: int = 1) -> None:
            # Those of the step before are done when no more than this one's are at work.
            mosaic.wait_for_products(products)
            before = slot(share, step + slots - 1, slots)
            pl.when(step > 0)(lambda: mosaic.arrive(barriers.at[before]))

        exponent = 0
        with backend.decoding_with(mosaic_decoding.WgmmaDecoding(width)):
            if config.has_few_rows and not format.is_flat:
                sums = [sum_of_few_rows()]
            elif parts == 1:
                sums = mosaic.accumulate(config.products, sums_of_blocks, scratch, sum_dtype)
            else:
                sums = mosaic.accumulate((tile_m,), sum_of_planes, scratch, sum_dtype)
                if scales_groups:
                    exponent = kind.scaled_exponent(operand, ptx=not interpret)
        if exponent:
            sums = [part * 2.0**-exponent for part in sums]

        def finish(sums: Sequence[jax.Array], row: int) -> None:
            for part in sums:
                part = part.astype(jnp.float32)
                for channels in of_channels:
                    part = scaled(part, channels)
                for ref in x_scales_ref:
                    scales = ref.at[pl.ds(first_row + row, part.shape[1])]
                    part *= mosaic.load_column(scales, interpret=interpret)
                store(part, row)
                row += part.shape[1]
            mosaic.wait_for_stores()

        def store(sums: jax.Array, row: int) -> None:
            tile = out_tiles.at[column]
            for start in range(0, sums.shape[1], tile.shape[0]):
                mosaic.wait_for_stores()
                part = sums[:, start : start + tile.shape[0]].astype(out_ref.dtype)
                mosaic.store_transposed(tile, part, interpret=interpret)
                target = out_ref.at[
                    0 if cluster_axis else split,
                    pl.ds(first_row + row + start, tile.shape[0]),
                    pl.ds(first_output + column * CHANNELS, CHANNELS),
                ]
                mosaic.copy_out(tile, target)

        epilogue.Epilogue(
            column=column,
            share=share,
            rank=split,
            axis=cluster_axis,
            finish=finish,
            interpret=interpret,
            **joining,
        ).run(sums)
