"""Copies of models for a CPU, with weights that are dequantised once.

On a CPU, a product with a packed weight dequantises it in every program, which takes longer than
multiplying a few rows. Dequantising ahead costs memory instead.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.kernels import ActivationFormat, QuantizedTensor
from mpjax.models.decoder import Decoder
from mpjax.models.layers import Linear


def decoded_bytes(model: Decoder) -> int:
    """The bytes of the arrays that `decoded` creates."""
    arrays = [linear.kernel.get_value() for linear in _linears(model)]
    arrays += [table.get_value() for table in _tables(model).values()]
    return sum(4 * array.shape[0] * array.shape[1] for array in arrays)


def decoded(model: Decoder) -> Decoder:
    """The model with float32 matrices, which gives the same logits except for rounding.

    Packed matrices for 16-bit activations are dequantised, and plain 16-bit ones are converted.
    Stacks of experts and matrices for 8-bit activations stay packed. All other arrays are shared
    with the model, which does not change.
    """
    model = nnx.clone(model)
    for linear in _linears(model):
        linear.kernel = nnx.Param(_in_float32(linear.kernel.get_value()))
    for name, table in _tables(model).items():
        setattr(model, name, nnx.Param(_in_float32(table.get_value())))
    return model


@jax.jit
def _in_float32(matrix: jax.Array | QuantizedTensor) -> jax.Array:
    if isinstance(matrix, QuantizedTensor):
        return matrix.dequantize(jnp.float32)
    return matrix.astype(jnp.float32)


def _linears(model: Decoder) -> list[Linear]:
    """The linear maps whose kernels are decoded or converted."""
    modules = (module for _, module in nnx.iter_modules(model))
    return [module for module in modules if isinstance(module, Linear) and _is_decoded(module)]


def _is_decoded(linear: Linear) -> bool:
    kernel: Any = linear.kernel.get_value()
    if len(kernel.shape) != 2:
        return False
    if not isinstance(kernel, QuantizedTensor):
        return bool(kernel.dtype in (jnp.bfloat16, jnp.float16))
    found = kernel.activations
    return isinstance(found, ActivationFormat) and found.values is None


def _tables(model: Decoder) -> dict[str, nnx.Param]:
    """The plain tables of the vocabulary in 16 bits, by their names."""
    found = {name: getattr(model, name) for name in model.config.tables}
    return {
        name: table
        for name, table in found.items()
        if not isinstance(table, Linear) and table.get_value().dtype != jnp.float32
    }
