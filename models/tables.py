"""The tables of a vocabulary: the embedding, which is looked up, and the head, which is multiplied.

Both are arrays [vocabulary, hidden], or linear maps with a packed kernel [hidden, vocabulary]. In
such a kernel the codes of one token are contiguous, so that a tied table can serve both purposes.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.kernels import QuantizedTensor, WeightFormat, matmul, quantize
from mpjax.kernels.quantize import why_out_of_range
from mpjax.kernels.quantized_tensor import concatenate, take_outputs
from mpjax.kernels.rowwise.projection import project
from mpjax.models.layers import Linear

CHUNK = 1 << 14  # tokens per step of `pack`, which needs several copies of them
Table = nnx.Param | Linear


def create(is_packed: bool, shape: tuple[int, int], dtype: str, rngs: nnx.Rngs) -> Table:
    """A random table (normal, σ = 0.02) of `shape` [vocabulary, hidden].

    is_packed: whether to create a Linear, whose plain kernel is later replaced by a packed one.
    """
    if is_packed:
        return Linear.create(shape[::-1], bias=False, dtype=dtype, rngs=rngs)
    return nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), shape, jnp.dtype(dtype)))


def pack(table: nnx.Param, format: WeightFormat) -> Linear:
    """The table as a packed linear map, rounded to nearest, CHUNK tokens at a time.

    Raises ValueError for weights that are too large or too small for the format, and for a hidden
    size that is not a multiple of its group.
    """
    weight = table.get_value()
    format.require_matrix(weight.shape[::-1], "the table")
    chunks = [weight[begin : begin + CHUNK] for begin in range(0, len(weight), CHUNK)]
    parts = [_quantize(chunk, format) for chunk in chunks]
    for chunk, part in zip(chunks, parts, strict=True):
        if reason := why_out_of_range(chunk, part):
            raise ValueError(f"the table: {reason}")
    packed = concatenate(parts)
    assert packed is not None  # parts of one format share a layout
    return Linear(packed)


@functools.partial(jax.jit, static_argnames="format")
def _quantize(rows: jax.Array, format: WeightFormat) -> QuantizedTensor:
    packed = quantize(rows.T, format)
    assert isinstance(packed, QuantizedTensor)  # `format` has codes
    return packed


def look_up(table: Table, tokens: jax.Array, dtype: str) -> jax.Array:
    """The rows of a table in `dtype`, [..., hidden], at token ids int [...]."""
    if not isinstance(table, Linear):
        return jnp.take(table.get_value(), tokens, axis=0).astype(dtype)
    kernel: Any = table.kernel.get_value()
    if not isinstance(kernel, QuantizedTensor):
        return jnp.take(kernel.T, tokens, axis=0).astype(dtype)
    return _rows(kernel, tokens, dtype)


@functools.partial(jax.jit, static_argnames="dtype")
def _rows(kernel: QuantizedTensor, tokens: jax.Array, dtype: str) -> jax.Array:
    rows = take_outputs(kernel, tokens.reshape(-1)).dequantize(dtype).T
    return rows.reshape(*tokens.shape, -1)


def logits(table: Table, hidden: jax.Array) -> jax.Array:
    """The products float32 [..., vocabulary] of hidden states [..., hidden] and a table's rows."""
    if isinstance(table, Linear):
        kernel: Any = table.kernel.get_value()
        if not isinstance(kernel, QuantizedTensor) and kernel.dtype == jnp.float32:
            hidden = hidden.astype(kernel.dtype)
        return matmul(hidden, kernel, out_dtype=jnp.float32)
    weight = table.get_value()
    if weight.dtype == jnp.float32:
        hidden = hidden.astype(weight.dtype)
    return project(hidden, weight)
