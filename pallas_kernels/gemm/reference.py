"""What the fused dequantise-GEMM computes, in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.formats import QuantizedTensor


def matmul(x: jax.Array, weight: QuantizedTensor) -> jax.Array:
    """The product x [M, K] · W [K, N], [M, N] in x's dtype, in float32 over the exact weight."""
    dense = weight.dequantize(jnp.float32)  # [K, N]
    product = jnp.dot(x.astype(jnp.float32), dense, precision=jax.lax.Precision.HIGHEST)
    return product.astype(x.dtype)
