"""The product of activations and a weight matrix in any format."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.formats import QuantizedTensor
from pallas_kernels.gemm import reference, triton, tuning

Implementation = Literal["triton", "dequantize", "reference"]


def matmul(
    x: jax.Array,
    weight: jax.Array | QuantizedTensor,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Multiplies x [..., K] by weight [K, N]: [..., N] in the dtype of x, summed in float32.

    A plain array is a plain dot. For a QuantizedTensor the implementation is chosen by device and
    number of rows, or forced:

    - `triton`: the fused kernel; weights stay packed in memory (TurboMind §3.4). bfloat16 and
      float16 on a CUDA GPU of compute capability 8.0 or more.
    - `dequantize`: writes the weight in x's dtype, then cuBLAS; the faster way for many rows.
    - `reference`: plain jnp in float32, on any device.

    Raises ValueError where K differs, and UnsupportedError, with the reason, where a forced
    implementation can't do the call.
    """
    if x.shape[-1] != weight.shape[0]:
        raise ValueError(
            f"matmul: x has {x.shape[-1]} channels in shape {x.shape}, "
            f"but the weight expects {weight.shape[0]} (shape {weight.shape})"
        )
    if not isinstance(weight, QuantizedTensor):
        return jnp.dot(x, weight)
    if x.size == 0:
        return jnp.zeros((*x.shape[:-1], weight.shape[1]), x.dtype)
    rows = x.reshape(-1, x.shape[-1])  # [M, K]
    if implementation is None:
        implementation = _choose(rows)
    elif implementation in ("triton", "dequantize") and (reason := _why_not_triton(rows)):
        raise backend.UnsupportedError(f"matmul: {implementation!r} can't run: {reason}")
    if implementation != "reference" and weight.permutation is not None:
        rows = jnp.take(rows, weight.permutation, axis=1)  # into the packed order
    compute = {
        "triton": _fused,
        "dequantize": _dequantize_then_dot,
        "reference": reference.matmul,
    }.get(implementation)
    if compute is None:
        raise ValueError(
            f"matmul: unknown implementation {implementation!r}: "
            "expected triton, dequantize or reference"
        )
    return compute(rows, weight).reshape(*x.shape[:-1], weight.shape[1])


def _choose(rows: jax.Array) -> Implementation:
    if reason := _why_not_triton(rows):
        backend.warn_of_reference("matmul", reason)
        return "reference"
    return "triton" if rows.shape[0] <= tuning.FUSED_ROWS else "dequantize"


def _why_not_triton(rows: jax.Array) -> str | None:
    if rows.dtype not in (jnp.bfloat16, jnp.float16):
        return f"activations are {rows.dtype}, expected bfloat16 or float16"
    return backend.why_triton_cannot_run()


def _fused(rows: jax.Array, weight: QuantizedTensor) -> jax.Array:
    return triton.matmul(rows, weight, tuning.configure(rows.shape[0], weight))


def _dequantize_then_dot(rows: jax.Array, weight: QuantizedTensor) -> jax.Array:
    # The barrier ties the scratch copy to its use: without it XLA may write out the weights of
    # several layers ahead of time, and hold them all.
    words, rows = jax.lax.optimization_barrier((weight.words, rows))
    scratch = triton.dequantize(dataclasses.replace(weight, words=words), rows.dtype)
    rows = jnp.pad(rows, ((0, 0), (0, weight.padded_channels - rows.shape[1])))
    return jnp.einsum("mk,nk->mn", rows, scratch)
