"""Writing a packed matrix out, for products that have better kernels without its codes."""

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

TILE = 64  # output channels that one program writes out
JOINED_CHANNELS = 256  # input channels that it writes at a time, in rows of 512 bytes


def matmul(
    x: jax.Array | QuantizedActivations, weight: QuantizedTensor, out_dtype: jnp.dtype
) -> jax.Array:
    """The product x [M, K] · W [K, N] in `out_dtype`, over a copy of W that lives for this call.

    The copy is in the dtype of x, or `out_dtype` where x is FP8, and the product is cuBLAS'. Of
    `liquid4` it is the int8 of its first level, and the product that of `int8`, to the bit.
    """
    # The barrier ties the scratch copy to its use: without it XLA may write out the weights of
    # several layers ahead of time, and hold them all.
    words, x = jax.lax.optimization_barrier((weight.words, x))
    weight = dataclasses.replace(weight, words=words)
    if weight.format.activations == "int8":
        assert isinstance(x, QuantizedActivations)
        if weight.channel_scales is None:
            return xla.matmul(x, weight, out_dtype)  # a plain matrix already
        plain = first_level(weight)
        problem = plans.Problem.of(len(x.values), plain)
        with plans.forced(None):  # what is forced is a plan for codes
            plan = plans.plan_of(problem)
            if plan.implementation == "mosaic" and plans.why_not_warpgroups(problem) is None:
                from mpjax.kernels.gemm.warpgroups import launch as warpgroups  # takes a while

                terms = warpgroups.matmul_terms(x, plain, plan.config, out_dtype)
                return terms.sum(0).astype(out_dtype)
            config = plans.triton_config_of(problem)
        return triton.matmul(x, plain, config, out_dtype)
    rows = x.dequantize(out_dtype) if isinstance(x, QuantizedActivations) else x
    scratch = write_out(weight, rows.dtype)
    rows = jnp.pad(rows, ((0, 0), (0, scratch.shape[1] - rows.shape[1])))
    wide = out_dtype if out_dtype == jnp.float32 else None  # without rounding in between
    return jnp.einsum("mk,nk->mn", rows, scratch, preferred_element_type=wide).astype(out_dtype)


def first_level(weight: QuantizedTensor) -> QuantizedTensor:
    """The `int8` weight that one of two levels, `liquid4`, stands for: the same numbers."""
    assert weight.channel_scales is not None
    words = write_out(weight, jnp.dtype(jnp.int8))
    scales = jax.lax.bitcast_convert_type(weight.channel_scales, jnp.uint32)
    return QuantizedTensor(
        words[None], scales[None], None, WeightFormat("int8"), weight.channels, "float32"
    )


@functools.partial(jax.jit, static_argnames=("dtype", "interpret"))
def write_out(weight: QuantizedTensor, dtype: jnp.dtype, *, interpret: bool = False) -> jax.Array:
    """The packed matrix as [N, K padded] in `dtype`, rows in packed order of input channels."""
    format = weight.format
    if format.is_flat:
        # A word is a code: XLA does this in one pass.
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
        grid=(pl.cdiv(outputs, TILE), blocks),
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
    output = first_program_id() * TILE + jnp.arange(TILE)
    block = pl.program_id(1)
    lane = jnp.arange(width)
    mask = None if words_ref.shape[1] % TILE == 0 else output < words_ref.shape[1]
    columns = [
        load_masked(words_ref.at[block, output[:, None], (column * width + lane)[None, :]], mask)
        for column in range(format.columns)
    ]
    shared = kind.shared(table_ref, out_ref.dtype, width)
    size = format.parameter_channels
    run = format.planes if size is None else min(format.planes, size // width)
    joined = min(format.planes, JOINED_CHANNELS // width)
    for first in range(0, format.planes, joined):
        tiles = []
        for plane in range(first, first + joined):
            if plane % run == 0:
                channel = block * format.block + plane * width
                index = jnp.int32(0) if size is None else channel // size
                parameters = load_masked(parameters_ref.at[index, output], mask)
                group = kind.load(parameters, scale_dtype, out_ref.dtype, width)
                decode = kind.decoder(columns, group.arguments, shared, out_ref.dtype)
            values = decode(plane)
            if group.scale is not None:
                values = (values.astype(jnp.float32) * group.scale).astype(out_ref.dtype)
            tiles.append(values)
        values = join(tiles)
        channel = block * format.block + first * width + jnp.arange(joined * width)
        store(
            out_ref.at[output[:, None], channel[None, :]],
            values,
            mask=None if mask is None else jnp.broadcast_to(mask[:, None], values.shape),
        )
