"""Products that first dequantise the weight to a plain matrix: faster for many rows."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels import codes as code_kinds
from mpjax.kernels.activations import QuantizedActivations
from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.gemm import plans, triton, xla
from mpjax.kernels.launch import Settings, first_program_id, join, launch, load_masked, store
from mpjax.kernels.quantized_tensor import QuantizedTensor

TILE_OUTPUTS = 64  # output channels of a program
CHANNELS_PER_STORE = 256  # input channels that are stored at a time: rows of 512 bytes in 16 bits


def matmul(
    x: jax.Array | QuantizedActivations, weight: QuantizedTensor, out_dtype: jnp.dtype
) -> jax.Array:
    """The product x [M, K] · W [K, N] in `out_dtype`, with a plain copy of W for this call.

    The copy has the dtype of x, or `out_dtype` if x is FP8 or multiplies `int4`, and cuBLAS
    multiplies it. For `liquid4` the copy is the int8 weight of its first level, which the kernels
    of `int8` multiply with a bit-identical result.
    """
    # Without the barrier XLA may dequantise the weights of several layers ahead of their products,
    # and keep all copies at the same time.
    words, x = jax.lax.optimization_barrier((weight.words, x))
    weight = dataclasses.replace(weight, words=words)
    if weight.format.operand == "int8" and weight.format.codes != "int4":
        assert isinstance(x, QuantizedActivations)
        if weight.channel_scales is None:
            return xla.matmul(x, weight, out_dtype)  # an int8 weight is a plain matrix already
        plain = first_level(weight)
        problem = plans.Problem.of(len(x.values), plain)
        with plans.forced(None):  # a forced plan is for the packed weight only
            plan = plans.plan_of(problem)
            if plan.implementation == "mosaic" and plans.why_not_warpgroups(problem) is None:
                from mpjax.kernels.gemm.warpgroups import launch as warpgroups  # slow to import

                terms = warpgroups.matmul_terms(x, plain, plan.config, out_dtype)
                return terms.sum(0).astype(out_dtype)
            config = plans.triton_config_of(problem)
        return triton.matmul(x, plain, config, out_dtype)
    rows = x.dequantize(out_dtype) if isinstance(x, QuantizedActivations) else x
    scratch = write_out(weight, rows.dtype)
    rows = jnp.pad(rows, ((0, 0), (0, scratch.shape[1] - rows.shape[1])))
    wide = out_dtype if out_dtype == jnp.float32 else None  # else rounded to 16 bits on the way
    return jnp.einsum("mk,nk->mn", rows, scratch, preferred_element_type=wide).astype(out_dtype)


def first_level(weight: QuantizedTensor) -> QuantizedTensor:
    """The `int8` weight with the values of a `liquid4` weight: codes of its first level."""
    assert weight.channel_scales is not None
    words = write_out(weight, jnp.dtype(jnp.int8))
    scales = jax.lax.bitcast_convert_type(weight.channel_scales, jnp.uint32)
    return QuantizedTensor(
        words[None], scales[None], WeightFormat("int8"), "float32", weight.padding
    )


@functools.partial(jax.jit, static_argnames=("dtype", "interpret"))
def write_out(weight: QuantizedTensor, dtype: jnp.dtype, *, interpret: bool = False) -> jax.Array:
    """The weight as a plain matrix [N, K padded] in `dtype`.

    Input channels are in the packed order. If `dtype` is int8, the matrix has the codes of
    `liquid4`'s first level, without channel scales.
    """
    format = weight.format
    if format.is_flat:
        # Each word is a code, which XLA scales in one pass.
        groups = weight.parameters.shape[0]
        values = weight.words[0].astype(jnp.float32)  # [N, K padded]
        scaled = values.reshape(len(values), groups, -1) * weight.scales().T[:, :, None]
        return scaled.reshape(values.shape).astype(dtype)
    if weight.channel_scales is not None and dtype != jnp.int8:
        first = write_out(weight, jnp.dtype(jnp.int8), interpret=interpret)
        return (first.astype(jnp.float32) * weight.channel_scales[:, None]).astype(dtype)
    blocks, outputs, _ = weight.words.shape
    return launch(
        functools.partial(_kernel, format=format, scale_dtype=weight.scale_dtype),
        (weight.words, weight.parameters, weight.table),
        out_shape=jax.ShapeDtypeStruct((outputs, blocks * format.block), dtype),
        grid=(pl.cdiv(outputs, TILE_OUTPUTS), blocks),
        settings=Settings(f"dequantize_{format.codes}", warps=4),
        interpret=interpret,
    )


def _kernel(
    operands: tuple[Any, Any, Any],
    out_ref: Any,  # [N, K padded]
    *,
    format: WeightFormat,
    scale_dtype: str,
) -> None:
    words_ref, parameters_ref, table_ref = operands
    kind, width = code_kinds.of(format), format.plane_width
    output = first_program_id() * TILE_OUTPUTS + jnp.arange(TILE_OUTPUTS)
    block = pl.program_id(1)
    lane = jnp.arange(width)
    mask = None if words_ref.shape[1] % TILE_OUTPUTS == 0 else output < words_ref.shape[1]
    columns = [
        load_masked(words_ref.at[block, output[:, None], (column * width + lane)[None, :]], mask)
        for column in range(format.columns)
    ]
    shared = kind.shared(table_ref, out_ref.dtype, width)
    size = format.parameter_channels
    run = format.planes if size is None else min(format.planes, size // width)
    joined = min(format.planes, CHANNELS_PER_STORE // width)
    for first in range(0, format.planes, joined):
        tiles = []
        for plane in range(first, first + joined):
            if plane % run == 0:
                channel = block * format.block + plane * width
                index = jnp.int32(0) if size is None else channel // size
                parameters = load_masked(parameters_ref.at[index, output], mask)
                groups = [
                    kind.load(part, scale_dtype, out_ref.dtype, width)
                    for part in kind.split_parameters(parameters)
                ]
                decoders = [
                    kind.decoder(columns, group.arguments, shared, out_ref.dtype)
                    for group in groups
                ]
            number = plane % run * kind.scales_of_word // run
            group, values = groups[number], decoders[number](plane)
            if group.scale is not None:
                values = (values.astype(jnp.float32) * group.scale).astype(out_ref.dtype)
            elif exponent := kind.scaled_exponent(out_ref.dtype):
                values = (values.astype(jnp.float32) * 2.0**-exponent).astype(out_ref.dtype)
            tiles.append(values)
        values = join(tiles)
        channel = block * format.block + first * width + jnp.arange(joined * width)
        store(
            out_ref.at[output[:, None], channel[None, :]],
            values,
            mask=None if mask is None else jnp.broadcast_to(mask[:, None], values.shape),
        )
