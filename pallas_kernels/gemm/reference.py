"""The product of activations and a packed weight in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mpjax.kernels.activations import QuantizedActivations
from mpjax.kernels.plain_codes import operands
from mpjax.kernels.quantized_tensor import QuantizedTensor, unpack


def matmul(
    x: jax.Array | QuantizedActivations, weight: QuantizedTensor, out_dtype: jnp.dtype
) -> jax.Array:
    """The product x [M, K] · W [K, N] in `out_dtype`, computed in float32 over exact operands.

    Sums of int8 products are exact integers. The input channels of a quantised x are in the packed
    order of W, those of any other x in their own order.
    """
    if isinstance(x, QuantizedActivations) and x.values.dtype == jnp.int8:
        codes = operands(unpack(weight))
        sums = jnp.dot(x.values, codes, preferred_element_type=jnp.int32)
        scales = weight.channel_scales if weight.channel_scales is not None else weight.scales()[0]
        return (sums.astype(jnp.float32) * x.scales * scales[None]).astype(out_dtype)
    rows = x.dequantize() if isinstance(x, QuantizedActivations) else x.astype(jnp.float32)
    dense = weight.dequantize(jnp.float32)  # [K, N]
    return jnp.dot(rows, dense, precision=jax.lax.Precision.HIGHEST).astype(out_dtype)
