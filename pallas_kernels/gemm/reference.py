"""What the product of activations and a packed weight is, in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mpjax.kernels import codes as code_kinds
from mpjax.kernels.activations import QuantizedActivations
from mpjax.kernels.codes.liquid import Liquid
from mpjax.kernels.quantized_tensor import QuantizedTensor, unpack


def matmul(
    x: jax.Array | QuantizedActivations, weight: QuantizedTensor, out_dtype: jnp.dtype
) -> jax.Array:
    """The product x [M, K] · W [K, N] in `out_dtype`: float32 over exact operands.

    Of two int8 operands the sums are exact integers. Rows of W and channels of x are in packed
    order where x is quantised, else in the order of the input channels.
    """
    if isinstance(x, QuantizedActivations) and x.values.dtype == jnp.int8:
        plain, kind = unpack(weight), code_kinds.of(weight.format)
        codes = kind.first_level(plain) if isinstance(kind, Liquid) else plain.codes
        sums = jnp.dot(x.values, codes, preferred_element_type=jnp.int32)
        scales = weight.channel_scales if weight.channel_scales is not None else weight.scales()[0]
        return (sums.astype(jnp.float32) * x.scales * scales[None]).astype(out_dtype)
    rows = x.dequantize() if isinstance(x, QuantizedActivations) else x.astype(jnp.float32)
    dense = weight.dequantize(jnp.float32)  # [K, N]
    return jnp.dot(rows, dense, precision=jax.lax.Precision.HIGHEST).astype(out_dtype)
