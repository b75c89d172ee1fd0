"""Fused dequantise-GEMM: one main loop for every packed weight format.

out.T = W · x.T, so that the weight is the operand that stays in registers and the batch is the
narrow side of the tensor-core instruction. A program owns `tile_n` output channels, `tile_m` rows
of x and one of `splits` ranges of K. Each row of words it loads becomes planes of exact integers
(code − zero); groups are multiplied by their scale in the float32 accumulator, where the scale
costs one operation per output instead of one per weight and loses no precision.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.bits import decode_plane, unpack_pair
from pallas_kernels.formats import QuantizedTensor, WeightFormat

DEQUANTIZE_TILE = 64  # output channels that one program writes out


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """Tile sizes and compiler settings of one launch; `splits` programs share one output tile."""

    tile_m: int
    tile_n: int
    splits: int
    warps: int
    stages: int


def matmul(
    x: jax.Array, weight: QuantizedTensor, config: GemmConfig, *, interpret: bool = False
) -> jax.Array:
    """The product x [M, K] (bfloat16 or float16) · W [K, N]; x is padded to whole blocks of W."""
    rows, outputs = x.shape[0], weight.shape[1]
    blocks = weight.words.shape[0]
    x = jnp.pad(x, ((0, 0), (0, weight.padded_channels - x.shape[1])))
    splits = min(config.splits, blocks)
    kernel = functools.partial(
        _kernel,
        format=weight.format,
        scale_dtype=jnp.dtype(weight.scale_dtype),
        config=dataclasses.replace(config, splits=splits),
        ptx=not interpret,
    )
    grid = (pl.cdiv(rows, config.tile_m), pl.cdiv(outputs, config.tile_n), splits)
    partial_dtype = x.dtype if splits == 1 else jnp.float32
    partials = backend.pallas_call(
        kernel,
        x,
        weight.words,
        weight.parameters,
        out_shape=jax.ShapeDtypeStruct((splits, rows, outputs), partial_dtype),
        grid=grid,
        name=f"matmul_{weight.format.codes}",
        warps=config.warps,
        stages=config.stages,
        interpret=interpret,
    )
    # XLA fuses this sum, in a fixed order, into whatever consumes the product.
    return partials[0] if splits == 1 else partials.sum(0).astype(x.dtype)


def _kernel(
    x_ref: Any,  # [M, K padded]
    words_ref: Any,  # [K blocks, N, plane width]
    parameters_ref: Any,  # [groups, N]
    out_ref: Any,  # [splits, M, N]
    *,
    format: WeightFormat,
    scale_dtype: jnp.dtype,
    config: GemmConfig,
    ptx: bool,
) -> None:
    rows, outputs = x_ref.shape[0], words_ref.shape[1]
    tile_m, tile_n, width = config.tile_m, config.tile_n, format.plane_width
    row = pl.program_id(0) * tile_m + jnp.arange(tile_m)
    output = pl.program_id(1) * tile_n + jnp.arange(tile_n)
    split = pl.program_id(2)
    lane = jnp.arange(width)
    # Masks only where a tile can stick out of the matrix.
    row_mask = None if rows % tile_m == 0 else row < rows
    output_mask = None if outputs % tile_n == 0 else output < outputs

    def load_parameters(group: jax.Array) -> tuple[jax.Array, jax.Array]:
        word = backend.load_masked(parameters_ref.at[group, output], output_mask)  # [tile_n]
        scale, zero = unpack_pair(word, scale_dtype, jnp.int16)
        return scale.astype(jnp.float32)[:, None], zero.astype(x_ref.dtype)[:, None]

    # A block holds one or more whole groups, or all blocks share one.
    groups = 1 if format.group_size is None else format.block // format.group_size
    planes = format.planes // groups
    shared = load_parameters(jnp.int32(0)) if format.group_size is None else None

    def step(block: jax.Array, accumulator: jax.Array) -> jax.Array:
        words = backend.load_masked(
            words_ref.at[block, output[:, None], lane[None, :]], output_mask
        )  # [tile_n, width]
        for group in range(groups):
            scale, zero = shared or load_parameters(block * groups + group)
            product = jnp.zeros((tile_n, tile_m), jnp.float32)
            for plane in range(group * planes, (group + 1) * planes):
                channel = block * format.block + plane * width + lane
                tile = backend.load_masked(x_ref.at[row[:, None], channel[None, :]], row_mask)
                weight = decode_plane(words, plane, format.bits, zero, ptx=ptx)
                product += backend.dot(weight, tile, trans_b=True)
            accumulator += product if shared else product * scale
        return accumulator

    blocks = words_ref.shape[0]
    first = split * blocks // config.splits
    last = (split + 1) * blocks // config.splits
    accumulator = jnp.zeros((tile_n, tile_m), jnp.float32)
    accumulator = jax.lax.fori_loop(first, last, step, accumulator)
    if shared:
        accumulator *= shared[0]
    backend.store(
        out_ref.at[split, row[:, None], output[None, :]],
        accumulator.T.astype(out_ref.dtype),
        mask=(row < rows)[:, None] & (output < outputs)[None, :],
    )


def dequantize(weight: QuantizedTensor, dtype: jnp.dtype, *, interpret: bool = False) -> jax.Array:
    """The packed matrix as [N, K padded] in `dtype`, rows in packed order of input channels."""
    blocks, outputs, _ = weight.words.shape
    kernel = functools.partial(
        _dequantize_kernel, format=weight.format, scale_dtype=jnp.dtype(weight.scale_dtype)
    )
    return backend.pallas_call(
        kernel,
        weight.words,
        weight.parameters,
        out_shape=jax.ShapeDtypeStruct((outputs, blocks * weight.format.block), dtype),
        grid=(pl.cdiv(outputs, DEQUANTIZE_TILE), blocks),
        name=f"dequantize_{weight.format.codes}",
        warps=4,
        stages=1,
        interpret=interpret,
    )


def _dequantize_kernel(
    words_ref: Any,  # [K blocks, N, plane width]
    parameters_ref: Any,  # [groups, N]
    out_ref: Any,  # [N, K padded]
    *,
    format: WeightFormat,
    scale_dtype: jnp.dtype,
) -> None:
    output = pl.program_id(0) * DEQUANTIZE_TILE + jnp.arange(DEQUANTIZE_TILE)
    block = pl.program_id(1)
    lane = jnp.arange(format.plane_width)
    mask = None if words_ref.shape[1] % DEQUANTIZE_TILE == 0 else output < words_ref.shape[1]
    words = backend.load_masked(words_ref.at[block, output[:, None], lane[None, :]], mask)
    for plane in range(format.planes):
        first = block * format.block + plane * format.plane_width
        group = jnp.int32(0) if format.group_size is None else first // format.group_size
        parameters = backend.load_masked(parameters_ref.at[group, output], mask)
        scale, zero = unpack_pair(parameters, scale_dtype, jnp.int16)
        codes = (words >> jnp.uint16(plane * format.bits)) & jnp.uint16(2**format.bits - 1)
        centred = codes.astype(jnp.int32) - zero.astype(jnp.int32)[:, None]
        values = centred.astype(jnp.float32) * scale.astype(jnp.float32)[:, None]
        backend.store(
            out_ref.at[output[:, None], (first + lane)[None, :]],
            values.astype(out_ref.dtype),
            mask=None if mask is None else jnp.broadcast_to(mask[:, None], values.shape),
        )
