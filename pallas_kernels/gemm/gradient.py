"""The derivatives of a product with a packed weight.

The derivative with respect to x is a product with the transposed matrix. Codes have no derivative,
but scales and tables do: the matrix is linear in them, so they can be learned (FLUTE §4.1).
Rounding, of activations or of new scales, counts as the identity (straight-through). All
derivatives are themselves differentiable; the transposed product is differentiated with the
plain matrix.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels import device
from mpjax.kernels.gemm.dequantize import write_out
from mpjax.kernels.gradients import with_gradients_of
from mpjax.kernels.quantized_tensor import QuantizedTensor, with_scales

Multiply = Callable[[jax.Array, QuantizedTensor], jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def differentiable(
    multiply: Multiply, x: jax.Array, weight: QuantizedTensor, scales: jax.Array | None
) -> jax.Array:
    """The terms [splits, M, N] of multiply(x, weight), with the derivatives of their sum, x · W.

    x: [M, K]. scales: [groups, N] instead of the weight's own, or None.
    """
    return multiply(x, weight if scales is None else with_scales(weight, scales))


def _forward(
    multiply: Multiply, x: jax.Array, weight: QuantizedTensor, scales: jax.Array | None
) -> tuple[jax.Array, tuple[Any, ...]]:
    return differentiable(multiply, x, weight, scales), (x, weight, scales)


def _backward(
    multiply: Multiply, saved: tuple[Any, ...], gradient: jax.Array
) -> tuple[jax.Array, QuantizedTensor, jax.Array | None]:
    x, weight, scales = saved
    # The terms are summed, so each has the gradient of the sum.
    gradient = gradient.mean(0)
    x_gradient = _times_transposed(gradient.astype(x.dtype), weight, scales)
    if scales is None and weight.channel_scales is None and weight.table is None:
        nothing = jax.tree.map(lambda leaf: np.zeros(leaf.shape, jax.dtypes.float0), weight)
        return x_gradient, nothing, None
    # The compiler removes unused gradients. On a mesh with explicit axes, the sum over divided rows
    # gets the sharding of the matrix.
    matrix, pull_back = jax.vjp(_dense, weight, scales)
    matrix_gradient = jnp.einsum(
        "mk,mn->kn",
        x,
        gradient,
        preferred_element_type=jnp.float32,
        out_sharding=_explicit_sharding(matrix),
    )
    return x_gradient, *pull_back(matrix_gradient)


differentiable.defvjp(_forward, _backward)


def _dense(weight: QuantizedTensor, scales: jax.Array | None) -> jax.Array:
    """The matrix [K, N] in float32, as a function of its learnable parameters."""
    fixed = jax.lax.stop_gradient(weight)
    tensor = dataclasses.replace(fixed, channel_scales=weight.channel_scales, table=weight.table)
    return tensor.dequantize(jnp.float32, scales=scales)


def _explicit_sharding(array: jax.Array) -> Any:
    """The sharding in an array's type; None without a mesh of explicit axes."""
    sharding: Any = jax.typeof(array).sharding
    return None if sharding.mesh.empty else sharding


def _times_transposed(
    gradient: jax.Array, weight: QuantizedTensor, scales: jax.Array | None
) -> jax.Array:
    """The product [M, K] of a gradient [M, N] and W.T, in the order of the input channels."""
    return with_gradients_of(_plain_product, _quick_product, gradient, weight, scales)


def _plain_product(
    gradient: jax.Array, weight: QuantizedTensor, scales: jax.Array | None
) -> jax.Array:
    matrix = _dense(weight, scales)
    return jnp.einsum("mn,kn->mk", gradient.astype(jnp.float32), matrix).astype(gradient.dtype)


def _quick_product(
    gradient: jax.Array, weight: QuantizedTensor, scales: jax.Array | None
) -> jax.Array:
    weight = weight if scales is None else with_scales(weight, scales)
    if device.why_triton_cannot_run() or gradient.dtype not in (jnp.bfloat16, jnp.float16):
        return jnp.einsum("mn,kn->mk", gradient, weight.dequantize(gradient.dtype))
    # As in the forward product, the matrix is not dequantised before the gradient is available.
    words, gradient = jax.lax.optimization_barrier((weight.words, gradient))
    matrix = write_out(dataclasses.replace(weight, words=words), gradient.dtype)
    product = jnp.einsum("mn,nk->mk", gradient, matrix)
    product = product[:, : weight.shape[0]]
    if weight.permutation is None:
        return product
    return jnp.zeros_like(product).at[:, weight.permutation].set(product)
