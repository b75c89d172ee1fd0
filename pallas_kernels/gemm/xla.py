"""Products of 8-bit operands that XLA does best itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.activations import QuantizedActivations
from pallas_kernels.quantized_tensor import QuantizedTensor


def matmul(x: QuantizedActivations, weight: QuantizedTensor, out_dtype: jnp.dtype) -> jax.Array:
    """The product x [M, K] · W [K, N] in `out_dtype`, W being a plain 8-bit matrix."""
    return scaled_dot(x, weight.words[0], weight.scales()[0], out_dtype)


def scaled_dot(
    x: QuantizedActivations, matrix: jax.Array, scales: jax.Array, out_dtype: jnp.dtype
) -> jax.Array:
    """(x [M, K] · matrix [N, K].T) · scales [N], scaled by x's row scales, in `out_dtype`.

    Stored [N, K], the matrix is read as it lies. Where XLA chooses a fusion of its own, that
    multiplies by the scales before it writes, so that the 32-bit sums never reach memory.
    """
    values = jnp.pad(x.values, ((0, 0), (0, matrix.shape[1] - x.values.shape[1])))
    sums = jax.lax.dot_general(
        values,
        matrix,
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.int32 if values.dtype == jnp.int8 else jnp.float32,
    )
    return (sums.astype(jnp.float32) * x.scales * scales).astype(out_dtype)
