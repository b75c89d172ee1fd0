"""Fused dequantise-GEMM in Triton: one main loop for every packed weight format.

The kernel computes out.T = W.T · x.T, so that the weight is the operand in registers and rows of x
are the narrow side of the tensor-core instruction. A program owns a tile of `tile_n` output
channels and `tile_m` rows of x, and one of `splits` ranges of K. It loads words of codes, decodes
them plane by plane to operands of the tensor cores, and multiplies. Only the decoder depends on the
kind of codes.

Scales are applied where they are cheapest. Scales of output channels and of rows are left to the
epilogue. Scales of groups multiply the sum over the group (one operation per output and group, no
loss of precision), or the decoded weights (one per weight, rounded to 16 bits, which is cheaper for
tiles of many rows).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels import codes as code_kinds
from mpjax.kernels.activations import QuantizedActivations
from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.gemm.plans.configuration import TritonConfig
from mpjax.kernels.gemm.plans.limits import can_be_operand
from mpjax.kernels.launch import Settings, first_program_id, join, launch, load_masked, store
from mpjax.kernels.quantized_tensor import QuantizedTensor
from mpjax.kernels.target import current_target

# Input channels of one product. The compiler would split a product of all channels of a step in
# two, and wait for both halves before it decodes the next step (docs/kernels/products.md).
CHANNELS_PER_PRODUCT = 128


class _Operands(NamedTuple):
    """The inputs of the kernel: arrays outside of it, references inside; None if there are none."""

    x: Any  # [M, K padded]
    x_scales: Any  # [M, 1 or groups], for quantised activations
    words: Any  # [K blocks, N, columns · plane width], or [1, N, K padded]
    parameters: Any  # [groups, N]
    channel_scales: Any  # [N]
    table: Any  # [2**bits]


def matmul(
    x: jax.Array | QuantizedActivations,
    weight: QuantizedTensor,
    config: TritonConfig,
    out_dtype: jnp.dtype,
    *,
    interpret: bool = False,
) -> jax.Array:
    """The product x [M, K] · W [K, N] in `out_dtype`; see `matmul_terms`."""
    terms = matmul_terms(x, weight, config, out_dtype, interpret=interpret)
    # XLA fuses this sum, whose order is fixed, into the operation that reads the product.
    return terms[0] if terms.shape[0] == 1 else terms.sum(0).astype(out_dtype)


# This function has a `jit` of its own, so that calls outside of any `jit` compile once.
@functools.partial(jax.jit, static_argnames=("config", "out_dtype", "interpret"))
def matmul_terms(
    x: jax.Array | QuantizedActivations,
    weight: QuantizedTensor,
    config: TritonConfig,
    out_dtype: jnp.dtype,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Terms [splits, M, N] whose sum over the first axis is x [M, K] · W [K, N].

    Several terms are float32; a single term has `out_dtype`. With `config.unsplit` there is a
    single term. x is padded with zeros to whole blocks of K.

    x: bfloat16 or float16, or QuantizedActivations if the format has 8-bit activations.
    """
    run = functools.partial(_launch, x, weight, out_dtype=out_dtype, interpret=interpret)
    if config.unsplit is None:
        return run(config)
    whole = run(dataclasses.replace(config, splits=1), outputs=config.unsplit)
    if config.unsplit >= weight.shape[1]:
        return whole
    rest = run(config, first=config.unsplit).sum(0, keepdims=True).astype(out_dtype)
    # XLA compiles this to one fusion, which writes in place; `.at[].set` would take three.
    return jax.lax.dynamic_update_slice(whole, rest, (0, 0, config.unsplit))


def _launch(
    x: jax.Array | QuantizedActivations,
    weight: QuantizedTensor,
    config: TritonConfig,
    *,
    out_dtype: jnp.dtype,
    interpret: bool,
    first: int = 0,
    outputs: int | None = None,
) -> jax.Array:
    """Launches the kernel for the output channels from `first` on: terms [splits, M, N − first].

    outputs: the number of channels to compute; the values of the others are undefined. None
        computes all.
    """
    values, x_scales = (x, None) if isinstance(x, jax.Array) else (x.values, x.scales)
    rows, columns = values.shape[0], weight.shape[1] - first
    steps = weight.padded_channels // (weight.format.planes * _width(weight.format, config))
    padding = weight.padded_channels - values.shape[1]
    splits = min(config.splits, steps)
    kernel = functools.partial(
        _kernel,
        format=weight.format,
        scale_dtype=weight.scale_dtype,
        config=dataclasses.replace(config, splits=splits),
        steps=steps,
        first_output=first,
    )
    operands = _Operands(
        jnp.pad(values, ((0, 0), (0, padding))) if padding else values,
        x_scales,
        weight.words,
        weight.parameters,
        weight.channel_scales,
        weight.table,
    )
    return launch(
        kernel,
        operands,
        out_shape=jax.ShapeDtypeStruct(
            (splits, rows, columns), out_dtype if splits == 1 else jnp.float32
        ),
        grid=(
            pl.cdiv(rows, config.tile_m),
            pl.cdiv(min(outputs or columns, columns), config.tile_n),
            splits,
        ),
        settings=Settings(
            f"matmul_{weight.format.codes}", warps=config.warps, stages=config.stages
        ),
        interpret=interpret,
    )


def _width(format: WeightFormat, config: TritonConfig) -> int:
    return config.width or format.plane_width


def _kernel(
    operands: _Operands,
    out_ref: Any,  # [splits, M, N − first]
    *,
    format: WeightFormat,
    scale_dtype: str,
    config: TritonConfig,
    steps: int,
    first_output: int,
) -> None:
    kind, target = code_kinds.of(format), current_target()
    x_ref, x_scales_ref = operands.x, operands.x_scales
    rows, outputs = x_ref.shape[0], operands.words.shape[1]
    tile_m, tile_n, width = config.tile_m, config.tile_n, _width(format, config)
    parts = format.plane_width // width  # the number of steps of a block
    row = first_program_id() * tile_m + jnp.arange(tile_m)
    output = first_output + pl.program_id(1) * tile_n + jnp.arange(tile_n)
    split = pl.program_id(2)
    lane = jnp.arange(width)
    # There are masks only if a tile may reach beyond the matrix.
    row_mask = None if rows % tile_m == 0 else row < rows
    output_mask = None if outputs % tile_n == 0 else output < outputs
    shared = kind.shared(operands.table, x_ref.dtype, width)

    def load_group(index: jax.Array) -> code_kinds.Group:
        words = load_masked(operands.parameters.at[index, output], output_mask)
        return kind.load(words, scale_dtype, x_ref.dtype, width)

    def load_columns(block: jax.Array, lane: jax.Array) -> list[jax.Array]:
        if format.is_flat:
            block, lane = jnp.int32(0), block * format.block + lane
        return [
            load_masked(
                operands.words.at[
                    block, output[:, None], (column * format.plane_width + lane)[None, :]
                ],
                output_mask,
            )
            for column in range(format.columns)
        ]

    def load_x(first: jax.Array, planes: int) -> jax.Array:
        number = jnp.arange(planes * width)
        if parts > 1:  # written so that the compiler sees that lanes are neighbours in memory
            plane, lane = jax.lax.div(number, width), jax.lax.rem(number, width)
            number = plane * format.plane_width + lane
        return load_masked(x_ref.at[row[:, None], (first + number)[None, :]], row_mask)

    # `run` neighbouring planes lie in one group of `size` input channels. If one group has all
    # input channels, its parameters are loaded here, before the loop.
    size = format.parameter_channels
    run = format.planes if size is None else min(format.planes, size // format.plane_width)
    whole = load_group(jnp.int32(0)) if size is None else None
    # Decoded weights are scaled only if the operands' dtype has the range of scales.
    fits = can_be_operand(scale_dtype, x_ref.dtype)
    has_scale = whole is None and kind.has_group_scales
    scale_weight = has_scale and config.scaling == "weight" and fits
    scale_sum = has_scale and not scale_weight
    sum_dtype = jnp.int32 if x_ref.dtype == jnp.int8 else jnp.float32
    # FP8 rows of x have a scale for each group of the weight, even if K is a single group.
    x_by_group = size is not None and x_ref.dtype == jnp.float8_e4m3fn

    # Only the last product of a step runs while the next step decodes. The compiler waits for every
    # other, because the next decoded planes overwrite the registers that it reads.
    joined = min(run if scale_sum else format.planes, max(1, CHANNELS_PER_PRODUCT // width))

    def step(number: jax.Array, accumulator: jax.Array) -> jax.Array:
        block, part = number, jnp.int32(0)
        if parts > 1:
            block, part = number // parts, number % parts * width
        columns = load_columns(block, part + lane)
        total = accumulator
        for first in range(0, format.planes, joined):
            weights = []
            for plane in range(first, first + joined):
                if plane % run == 0:
                    index = (block * format.block + plane * format.plane_width) // (size or 1)
                    group = load_group(index) if whole is None else whole
                    if scale_weight:
                        decode = kind.scaled_decoder(columns, group, shared, x_ref.dtype)
                    else:
                        arguments = group.arguments
                        decode = kind.decoder(columns, arguments, shared, x_ref.dtype)
                weights.append(decode(plane))
            tile = load_x(block * format.block + first * format.plane_width + part, joined)
            if scale_sum and first % run == 0:
                total = zeros  # the sum over a group, which is scaled before it is accumulated
            total += target.dot(join(weights), tile, trans_b=True)
            if scale_sum and (first + joined) % run == 0:
                assert group.scale is not None
                scale = group.scale
                if x_by_group:
                    scale = scale * load_x_scales(index)[None, :]
                accumulator = total = target.multiply_add(total, scale, accumulator)
        return total

    def load_x_scales(index: jax.Array) -> jax.Array:
        return load_masked(x_scales_ref.at[row, index], row_mask)  # [tile_m]

    zeros = jnp.zeros((tile_n, tile_m), sum_dtype)
    accumulator = jax.lax.fori_loop(
        split * steps // config.splits, (split + 1) * steps // config.splits, step, zeros
    ).astype(jnp.float32)
    if scale_weight and (exponent := kind.scaled_exponent(x_ref.dtype)):
        accumulator *= 2.0**-exponent
    if whole is not None:
        accumulator *= whole.scale
    if operands.channel_scales is not None:
        scales = load_masked(operands.channel_scales.at[output], output_mask)
        accumulator *= scales[:, None]
    if x_scales_ref is not None and not x_by_group:
        accumulator *= load_x_scales(jnp.int32(0))[None, :]
    store(
        out_ref.at[split, row[:, None], (output - first_output)[None, :]],
        accumulator.T.astype(out_ref.dtype),
        mask=(row < rows)[:, None] & (output < outputs)[None, :],
    )
