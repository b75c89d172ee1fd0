"""Products of 8-bit operands that XLA does best itself."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels import device
from mpjax.kernels.activations import QuantizedActivations
from mpjax.kernels.launch import Settings, first_program_id, launch, load_masked, store
from mpjax.kernels.quantized_tensor import QuantizedTensor

TILE_ROWS, TILE_CHANNELS = 8, 512  # of the sums that one program scales


def matmul(x: QuantizedActivations, weight: QuantizedTensor, out_dtype: jnp.dtype) -> jax.Array:
    """The product x [M, K] · W [K, N] in `out_dtype`, W being a plain 8-bit matrix."""
    return scaled_dot(x, weight.words[0], weight.scales()[0], out_dtype)


def scaled_dot(
    x: QuantizedActivations,
    matrix: jax.Array,
    scales: jax.Array,
    out_dtype: jnp.dtype,
    *,
    interpret: bool = False,
) -> jax.Array:
    """(x [M, K] · matrix [N, K].T) · scales [N], scaled by x's row scales, in `out_dtype`.

    Stored [N, K], the matrix is read as it lies. On a GPU, sums of FP8 products leave cuBLAS in
    bfloat16 if that is the output's dtype, and are rounded once more when they are scaled: far less
    than what rounding x to FP8 costs, for half the bytes.
    """
    values = jnp.pad(x.values, ((0, 0), (0, matrix.shape[1] - x.values.shape[1])))
    wide = jnp.int32 if values.dtype == jnp.int8 else jnp.float32
    fast = interpret or device.why_triton_cannot_run() is None
    narrow = fast and wide == jnp.float32 and out_dtype == jnp.bfloat16
    sums = jax.lax.dot_general(
        values,
        matrix,
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.bfloat16 if narrow else wide,
    )
    if narrow:
        return _scale(sums, x.scales, scales, interpret=interpret)
    return (sums.astype(jnp.float32) * x.scales * scales[None]).astype(out_dtype)


def _scale(
    sums: jax.Array, row_scales: jax.Array, scales: jax.Array, *, interpret: bool
) -> jax.Array:
    """Sums [M, N] times row_scales [M, 1] and scales [N]: faster than XLA's own loop."""
    return launch(
        _scale_kernel,
        (sums, row_scales, scales),
        out_shape=jax.ShapeDtypeStruct(sums.shape, sums.dtype),
        grid=(pl.cdiv(sums.shape[0], TILE_ROWS), pl.cdiv(sums.shape[1], TILE_CHANNELS)),
        settings=Settings("scale", warps=4),
        interpret=interpret,
        aliases={0: 0},  # half the bytes in the L2 cache
    )


def _scale_kernel(operands: tuple[Any, Any, Any], out_ref: Any) -> None:
    sums_ref, row_scales_ref, scales_ref = operands
    row = first_program_id() * TILE_ROWS + jnp.arange(TILE_ROWS)
    channel = pl.program_id(1) * TILE_CHANNELS + jnp.arange(TILE_CHANNELS)
    inside = (row < out_ref.shape[0])[:, None] & (channel < out_ref.shape[1])[None, :]
    at = row[:, None], channel[None, :]
    values = load_masked(sums_ref.at[*at], inside)
    row_scales = load_masked(row_scales_ref.at[row, 0], row < out_ref.shape[0])
    scales = load_masked(scales_ref.at[channel], channel < out_ref.shape[1])
    scaled = values.astype(jnp.float32) * row_scales[:, None] * scales[None, :]
    store(out_ref.at[*at], scaled.astype(out_ref.dtype), mask=inside)
