"""The grouped product in plain jnp: a loop over all experts."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.kernels.divided_rows import DividedRows
from mpjax.kernels.experts.epilogue import Epilogue
from mpjax.kernels.gemm.api import matmul
from mpjax.kernels.invariance import in_row_tiles
from mpjax.kernels.quantized_tensor import QuantizedTensor


def products(
    x: jax.Array,
    weight: jax.Array | QuantizedTensor,
    experts: jax.Array,
    epilogue: Epilogue,
    activations: DividedRows | None = None,
) -> jax.Array:
    """Products [tokens, k, N] in float32 of each token's row with its experts' matrices.

    x: [tokens, K], or [tokens, k, K] with a row for each expert. weight: [experts, K, N]. experts:
    int [tokens, k]. With a gate the result is [tokens, k, N / 2].
    activations: how parts of rows are rounded; None for whole rows.
    """
    rows = x if x.ndim == 3 else x[:, None]  # [tokens, k or 1, K]

    def add(total: jax.Array, entry: tuple[jax.Array, Any]) -> tuple[jax.Array, None]:
        number, matrix = entry
        product = _product(rows, matrix, activations)
        return jnp.where((experts == number)[..., None], product, total), None

    count = len(jax.tree.leaves(weight)[0])
    outputs = weight.shape[-1]
    start = jnp.zeros((*experts.shape, outputs), jnp.float32)
    # For gradients, the loop's products are recomputed instead of stored for every expert.
    total, _ = jax.lax.scan(jax.checkpoint(add), start, (jnp.arange(count), weight))
    if epilogue.bias is not None:
        total += jnp.take(epilogue.bias, experts, axis=0).astype(jnp.float32)
    if epilogue.gate is not None:
        total = epilogue.gate(*jnp.split(total, 2, -1))
    if epilogue.routing_weights is not None:
        total *= epilogue.routing_weights.astype(jnp.float32)[..., None]
    return total


def _product(rows: jax.Array, matrix: Any, activations: DividedRows | None) -> jax.Array:
    if isinstance(matrix, QuantizedTensor):
        return matmul(
            rows,
            matrix,
            implementation="reference",
            out_dtype=jnp.float32,
            activations=activations,
        )
    wide, highest = matrix.astype(jnp.float32), jax.lax.Precision.HIGHEST
    multiply = functools.partial(jnp.matmul, precision=highest)
    return in_row_tiles(multiply, rows.astype(jnp.float32), wide)
