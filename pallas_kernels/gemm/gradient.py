"""The derivative of a product with a packed weight.

With respect to x it is a product with the transposed matrix. Codes have none, but scales and
tables do: the matrix is linear in them, so that they can be learned (FLUTE §4.1). Rounding, of
activations or of new scales, counts as the identity (straight-through).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import backend
from pallas_kernels.gemm.dequantize import write_out
from pallas_kernels.quantized_tensor import QuantizedTensor, replace_scales

Multiply = Callable[[jax.Array, QuantizedTensor], jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def differentiable(
    multiply: Multiply, x: jax.Array, weight: QuantizedTensor, scales: jax.Array | None
) -> jax.Array:
    """multiply(x [M, K], weight), terms [splits, M, N], with the derivatives of their sum x · W.

    scales: [groups, N] in the place of the weight's own, or None.
    """
    return multiply(x, weight if scales is None else replace_scales(weight, scales))


def _forward(
    multiply: Multiply, x: jax.Array, weight: QuantizedTensor, scales: jax.Array | None
) -> tuple[jax.Array, tuple[Any, ...]]:
    return differentiable(multiply, x, weight, scales), (x, weight, scales)


def _backward(
    multiply: Multiply, saved: tuple[Any, ...], gradient: jax.Array
) -> tuple[jax.Array, QuantizedTensor, jax.Array | None]:
    x, weight, scales = saved
    gradient = gradient.mean(0)  # what sums the terms has the same derivative for all of them
    current = weight if scales is None else replace_scales(weight, scales)
    of_x = _times_transposed(gradient.astype(x.dtype), current)

    def dense(scales: jax.Array | None, channel_scales: Any, table: Any) -> jax.Array:
        tensor = dataclasses.replace(weight, channel_scales=channel_scales, table=table)
        return tensor.dequantize(jnp.float32, scales=scales)

    of_weight = jax.tree.map(lambda leaf: np.zeros(leaf.shape, jax.dtypes.float0), weight)
    if scales is None and weight.channel_scales is None and weight.table is None:
        return of_x, of_weight, None
    # What nobody asks for, the compiler leaves out.
    of_matrix = jnp.einsum("mk,mn->kn", x, gradient, preferred_element_type=jnp.float32)
    _, pull = jax.vjp(dense, scales, weight.channel_scales, weight.table)
    of_scales, of_channel_scales, of_table = pull(of_matrix)
    of_weight = dataclasses.replace(of_weight, channel_scales=of_channel_scales, table=of_table)
    return of_x, of_weight, of_scales


differentiable.defvjp(_forward, _backward)


def _times_transposed(gradient: jax.Array, weight: QuantizedTensor) -> jax.Array:
    """Gradient [M, N] · W.T, [M, K] in the order of the input channels."""
    if backend.why_triton_cannot_run() or gradient.dtype not in (jnp.bfloat16, jnp.float16):
        return jnp.einsum("mn,kn->mk", gradient, weight.dequantize(gradient.dtype))
    # As forward: the copy of the matrix waits for its use.
    words, gradient = jax.lax.optimization_barrier((weight.words, gradient))
    matrix = write_out(dataclasses.replace(weight, words=words), gradient.dtype)
    product = jnp.einsum("mn,nk->mk", gradient, matrix)
    product = product[:, : weight.channels]
    if weight.permutation is None:
        return product
    return jnp.zeros_like(product).at[:, weight.permutation].set(product)
