"""The product of activations and a packed weight in plain jnp."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from mpjax.kernels.activations import QuantizedActivations
from mpjax.kernels.invariance import in_row_tiles
from mpjax.kernels.plain_codes import in_groups, operands
from mpjax.kernels.quantized_tensor import QuantizedTensor, unpack


def matmul(
    x: jax.Array | QuantizedActivations, weight: QuantizedTensor, out_dtype: jnp.dtype
) -> jax.Array:
    """The product x [M, K] · W [K, N] in `out_dtype`, computed in float32 over exact operands.

    Sums of int8 products, in blocks of 128 channels if blocks have scales, are exact integers.
    The input channels of a quantised x are in the packed order of W, those of any other x in their
    own order.
    """
    if isinstance(x, QuantizedActivations) and weight.format.codes == "int4":
        return _of_blocks(x, weight).astype(out_dtype)
    if isinstance(x, QuantizedActivations) and x.values.dtype == jnp.int8:
        codes = operands(unpack(weight))
        sums = jnp.dot(x.values, codes, preferred_element_type=jnp.int32)
        scales = weight.channel_scales if weight.channel_scales is not None else weight.scales()[0]
        return (sums.astype(jnp.float32) * x.scales * scales[None]).astype(out_dtype)
    rows = x.dequantize() if isinstance(x, QuantizedActivations) else x.astype(jnp.float32)
    dense = weight.dequantize(jnp.float32)  # [K, N]
    multiply = functools.partial(jnp.dot, precision=jax.lax.Precision.HIGHEST)
    return in_row_tiles(multiply, rows, dense).astype(out_dtype)


def _of_blocks(x: QuantizedActivations, weight: QuantizedTensor) -> jax.Array:
    """The float32 sum [M, N] over blocks of 128 channels of their scaled integer sums.

    A block's sum of int8 · int4 is below 2**17 in magnitude, so float32 represents it exactly, in
    any order of summation.
    """
    plain = unpack(weight)
    groups = in_groups(plain.codes, weight.format).astype(jnp.float32)  # [groups, 128, N]
    rows, channels = x.shape
    values = jnp.pad(x.values, ((0, 0), (0, -channels % groups.shape[1])))
    blocks = values.reshape(rows, *groups.shape[:2]).swapaxes(0, 1).astype(jnp.float32)

    def add(total: jax.Array, block: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        values, codes, x_scales, scales = block
        sums = jnp.dot(values, codes, precision=jax.lax.Precision.HIGHEST)
        return total + sums * (x_scales[:, None] * scales[None]), None

    total = jnp.zeros((rows, plain.shape[1]), jnp.float32)
    total, _ = jax.lax.scan(add, total, (blocks, groups, x.scales.T, plain.scales))
    return total
