"""The public product of tokens and the experts that they are routed to."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

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
from mpjax.kernels.experts import reference
from mpjax.kernels.experts.gate import Gate
from mpjax.kernels.implementation import choose
from mpjax.kernels.quantized_tensor import QuantizedTensor

Implementation = Literal["reference"]


def grouped_matmul(
    x: jax.Array,
    weight: jax.Array | QuantizedTensor,
    experts: jax.Array,
    *,
    routing_weights: jax.Array | None = None,
    bias: jax.Array | None = None,
    gate: Gate | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """The products of tokens with the matrices of the experts that they are routed to.

    Token t's j-th product is x[t] · weight[experts[t, j]], or x[t, j] · … where x has a row for
    each expert. Nothing but the chosen experts' matrices is read on a GPU.

    x: [..., K], or [..., k, K]. weight: [experts, K, N], a stack of plain matrices, or a
        QuantizedTensor with one leading axis, in any weight format.
    experts: int [..., k], the numbers of each token's experts; an expert may have any number of
        tokens, also none or all.
    routing_weights: [..., k]. If they are given, the result is the sum of a token's products times
        them, in the order of k; without, it is all products.
    bias: [experts, N], added to the products, before a gate and routing weights.
    gate: maps the two halves of a product, gate and up, to one.
    implementation: `reference`, a loop over all experts in plain jnp in float32.

    Returns [..., k, N], with a gate [..., k, N / 2], and with routing weights without the axis k,
    in the dtype of x.
    Differentiable in reverse with respect to x, routing weights, the bias and a plain weight.
    Raises ValueError for shapes that don't fit and, where values are known, for experts that there
    are none of; and UnsupportedError, with the reason, if a forced implementation can't run.
    """
    call = _read("grouped_matmul", x, weight, experts, routing_weights, bias, gate)
    dtype = call.x.dtype
    terms = _terms(call, implementation)  # [terms, tokens, N]
    if routing_weights is not None:
        return terms.sum(0).astype(dtype).reshape(*call.tokens, terms.shape[-1])
    products = jnp.moveaxis(terms, 0, 1).astype(dtype)
    return products.reshape(*call.tokens, len(terms), terms.shape[-1])


def grouped_matmul_terms(
    x: jax.Array,
    weight: jax.Array | QuantizedTensor,
    experts: jax.Array,
    routing_weights: jax.Array,
    *,
    bias: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """The terms float32 [terms, ..., N] whose sum over the first axis is that of `grouped_matmul`.

    They are for a consumer that adds them up itself, as `add_rms_norm` does. Arguments, errors and
    derivatives are as for `grouped_matmul` with routing weights.
    """
    routing_weights = as_array("grouped_matmul_terms: routing_weights", routing_weights)
    call = _read("grouped_matmul_terms", x, weight, experts, routing_weights, bias, None)
    terms = _terms(call, implementation)
    return terms.reshape(len(terms), *call.tokens, terms.shape[-1])


class _Call(NamedTuple):
    """The arguments of a product, checked, with one axis of tokens."""

    x: jax.Array  # [tokens, K] or [tokens, k, K]
    weight: Any  # [experts, K, N]
    experts: jax.Array  # [tokens, k]
    routing_weights: jax.Array | None  # [tokens, k]
    bias: jax.Array | None  # [experts, N]
    gate: Gate | None
    tokens: tuple[int, ...]  # the axes that the tokens had


def _terms(call: _Call, implementation: Implementation | None) -> jax.Array:
    """The products of each token's experts, float32 [k, tokens, N]."""
    name = choose(
        "grouped_matmul", implementation, "reference", get_args(Implementation), lambda _: None
    )
    assert name == "reference"
    return jnp.moveaxis(reference.products(*call[:-1]), 1, 0)


def _read(
    operation: str,
    x: Any,
    weight: Any,
    experts: Any,
    routing_weights: Any,
    bias: Any,
    gate: Gate | None,
) -> _Call:
    """Converts the arguments to arrays. Raises ValueError where their shapes don't fit."""
    x, experts = as_array(f"{operation}: x", x), as_array(f"{operation}: experts", experts)
    require_floats(operation, x=x)
    if not isinstance(weight, QuantizedTensor):
        weight = as_array(f"{operation}: the weight", weight)
        require_floats(operation, weight=weight)
    if len(weight.shape) != 3:
        raise ValueError(
            f"{operation}: the weight has shape {tuple(weight.shape)}: expected a stack of "
            "matrices [experts, K, N]"
        )
    count, channels, outputs = weight.shape
    if not experts.ndim or not jnp.issubdtype(experts.dtype, jnp.integer):
        raise ValueError(
            f"{operation}: experts are {shown(experts)}: expected integers of shape [..., k]"
        )
    if x.shape not in ((*experts.shape[:-1], channels), (*experts.shape, channels)):
        raise ValueError(
            f"{operation}: x has shape {x.shape}: expected {(*experts.shape[:-1], channels)} or "
            f"{(*experts.shape, channels)}, by the experts and the weight"
        )
    if not are_between(experts, 0, count - 1):
        raise ValueError(f"{operation}: experts must be from 0 to {count - 1}")
    routing_weights = optional_array(f"{operation}: routing_weights", routing_weights)
    bias = optional_array(f"{operation}: bias", bias)
    for name, array, shape in (
        ("routing_weights", routing_weights, experts.shape),
        ("bias", bias, (count, outputs)),
    ):
        if array is not None and array.shape != shape:
            raise ValueError(f"{operation}: {name} has shape {array.shape}: expected {shape}")
    if gate is not None:
        require_type(f"{operation}: gate", gate, Gate)
        if outputs % 2:
            raise ValueError(f"{operation}: {outputs} outputs have no halves, gate and up")
    per_token = experts.shape[-1]
    own_rows = x.ndim > experts.ndim
    return _Call(
        x.reshape(-1, per_token, channels) if own_rows else x.reshape(-1, channels),
        weight,
        experts.reshape(-1, per_token),
        None if routing_weights is None else routing_weights.reshape(-1, per_token),
        bias,
        gate,
        experts.shape[:-1],
    )
