"""The checked arguments of grouped products."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mpjax.kernels.checks import (
    are_between,
    as_array,
    optional_array,
    require_floats,
    require_type,
    shown,
)
from mpjax.kernels.divided_rows import DividedRows
from mpjax.kernels.experts.epilogue import Epilogue
from mpjax.kernels.experts.gate import Gate
from mpjax.kernels.experts.local import LocalExperts
from mpjax.kernels.product_format import ActivationFormat
from mpjax.kernels.quantized_tensor import QuantizedTensor


class Call(NamedTuple):
    """The checked arguments of a grouped product, with one axis of tokens."""

    x: jax.Array  # [tokens, K] or [tokens, k, K]
    weight: Any  # [experts, K, N]
    experts: jax.Array  # [tokens, k]
    epilogue: Epilogue
    tokens: tuple[int, ...]  # the original axes of the tokens
    is_local: bool  # whether experts may be −1, as in LocalExperts
    total: int | None  # the number of all experts, if the weight has fewer


def require_no_activation_scale(operation: str, weight: Any) -> None:
    """Raises ValueError for a stack with a static activation scale."""
    if isinstance(weight, QuantizedTensor) and weight.activation_scale is not None:
        raise ValueError(
            f"{operation}: the weight has an activation_scale, and rows that experts share have a "
            "scale of their own: leave it out"
        )


def read_call(operation: str, x: Any, weight: Any, experts: Any, epilogue: Epilogue) -> Call:
    """Converts the arguments to arrays. Raises ValueError if their shapes don't fit."""
    is_local = isinstance(experts, LocalExperts)
    total = experts.total if is_local else None
    experts = as_array(f"{operation}: experts", experts.numbers if is_local else experts)
    x = as_array(f"{operation}: x", x)
    require_floats(operation, x=x)
    if not isinstance(weight, QuantizedTensor):
        weight = as_array(f"{operation}: the weight", weight)
        require_floats(operation, weight=weight)
    if len(weight.shape) != 3 or 0 in weight.shape:
        raise ValueError(
            f"{operation}: the weight has shape {tuple(weight.shape)}: expected a stack of "
            "matrices [experts, K, N], with one of each or more"
        )
    require_no_activation_scale(operation, weight)
    count, channels, outputs = weight.shape
    is_integer = jnp.issubdtype(experts.dtype, jnp.integer)
    if not experts.ndim or not experts.shape[-1] or not is_integer:
        raise ValueError(
            f"{operation}: experts are {shown(experts)}: expected integers of shape [..., k], with "
            "one expert or more for each token"
        )
    if x.shape not in ((*experts.shape[:-1], channels), (*experts.shape, channels)):
        raise ValueError(
            f"{operation}: x has shape {x.shape}: expected {(*experts.shape[:-1], channels)} or "
            f"{(*experts.shape, channels)}, by the experts and the weight"
        )
    if not are_between(experts, -1 if is_local else 0, count - 1):
        raise ValueError(f"{operation}: experts must be from 0 to {count - 1}")
    epilogue = _read_epilogue(operation, epilogue, experts.shape, (count, outputs))
    per_token = experts.shape[-1]
    numbers = experts.reshape(-1, per_token).astype(jnp.int32)
    if is_local and epilogue.routing_weights is not None:
        mine = jnp.where(numbers >= 0, epilogue.routing_weights, 0)
        epilogue = dataclasses.replace(epilogue, routing_weights=mine)
    own_rows = x.ndim > experts.ndim
    return Call(
        x.reshape(-1, per_token, channels) if own_rows else x.reshape(-1, channels),
        weight,
        numbers,
        epilogue,
        experts.shape[:-1],
        is_local,
        total,
    )


def _read_epilogue(
    operation: str, epilogue: Epilogue, chosen: tuple[int, ...], outputs: tuple[int, int]
) -> Epilogue:
    """The epilogue with arrays, and one axis of tokens. Raises ValueError if shapes don't fit.

    chosen: the shape of `experts`. outputs: the numbers of experts and of each expert's outputs.
    """
    weights = optional_array(f"{operation}: routing_weights", epilogue.routing_weights)
    bias = optional_array(f"{operation}: bias", epilogue.bias)
    for name, array, shape in (("routing_weights", weights, chosen), ("bias", bias, outputs)):
        if array is not None and array.shape != shape:
            raise ValueError(f"{operation}: {name} has shape {array.shape}: expected {shape}")
    if epilogue.gate is not None:
        require_type(f"{operation}: gate", epilogue.gate, Gate)
        if outputs[1] % 2:
            raise ValueError(f"{operation}: {outputs[1]} outputs have no halves, gate and up")
    weights = None if weights is None else weights.reshape(-1, chosen[-1])
    return Epilogue(bias, epilogue.gate, weights)


def check_divided_rows(operation: str, activations: Any, weight: Any) -> None:
    """Raises ValueError for a rounding that differs from the weight's activations."""
    require_type(f"{operation}: activations", activations, DividedRows)
    is_packed = isinstance(weight, QuantizedTensor)
    own = weight.activations if is_packed else ActivationFormat()
    if own != activations.format:
        kind = weight.format if is_packed else "plain"
        raise ValueError(
            f"{operation}: activations are rounded to {activations.format}, and beside a weight in "
            f"{kind} to {own}: expected None, or DividedRows of the weight's own format"
        )
