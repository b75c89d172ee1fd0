"""Products of two 8-bit matrices by XLA's own product, which calls cuBLAS."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels import device
from mpjax.kernels.activations import QuantizedActivations
from mpjax.kernels.launch import Settings, first_program_id, launch, load_masked, store
from mpjax.kernels.quantized_tensor import QuantizedTensor

TILE_ROWS, TILE_OUTPUTS = 8, 512  # rows and output channels of the sums that a program scales


def matmul(x: QuantizedActivations, weight: QuantizedTensor, out_dtype: jnp.dtype) -> jax.Array:
    """The product x [M, K] · W [K, N] in `out_dtype`, for a weight whose words are 8-bit codes."""
    return scaled_dot(x, weight.words[0], weight.scales()[0], out_dtype)


def scaled_dot(
    x: QuantizedActivations,
    matrix: jax.Array,
    scales: jax.Array,
    out_dtype: jnp.dtype,
    *,
    interpret: bool = False,
) -> jax.Array:
    """(x [M, K] · matrix [N, K].T) · scales [N] · x's scales [M, 1], in `out_dtype`.

    The matrix is multiplied in its stored layout, without a transposition. On a GPU, if `out_dtype`
    is bfloat16, cuBLAS stores sums of FP8 products in bfloat16, which are rounded again when they
    are scaled. This halves the bytes, and its error is far smaller than that of rounding x to FP8.
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
    """Sums [M, N] · row_scales [M, 1] · scales [N], in a kernel that is faster than XLA's loop."""
    return launch(
        _scale_kernel,
        (sums, row_scales, scales),
        out_shape=jax.ShapeDtypeStruct(sums.shape, sums.dtype),
        grid=(pl.cdiv(sums.shape[0], TILE_ROWS), pl.cdiv(sums.shape[1], TILE_OUTPUTS)),
        settings=Settings("scale", warps=4),
        interpret=interpret,
        aliases={0: 0},  # in place, which takes half the L2 cache
    )


def _scale_kernel(operands: tuple[Any, Any, Any], out_ref: Any) -> None:
    sums_ref, row_scales_ref, scales_ref = operands
    row = first_program_id() * TILE_ROWS + jnp.arange(TILE_ROWS)
    output = pl.program_id(1) * TILE_OUTPUTS + jnp.arange(TILE_OUTPUTS)
    inside = (row < out_ref.shape[0])[:, None] & (output < out_ref.shape[1])[None, :]
    at = row[:, None], output[None, :]
    values = load_masked(sums_ref.at[*at], inside)
    row_scales = load_masked(row_scales_ref.at[row, 0], row < out_ref.shape[0])
    scales = load_masked(scales_ref.at[output], output < out_ref.shape[1])
    scaled = values.astype(jnp.float32) * row_scales[:, None] * scales[None, :]
    store(out_ref.at[*at], scaled.astype(out_ref.dtype), mask=inside)
