"""The public grouped products of tokens with the experts to which they are routed."""

from __future__ import annotations

import functools
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from mpjax.kernels.checks import as_array
from mpjax.kernels.divided_rows import DividedRows
from mpjax.kernels.experts import reference
from mpjax.kernels.experts.arguments import Call, check_divided_rows, read_call
from mpjax.kernels.experts.epilogue import Epilogue
from mpjax.kernels.experts.gate import Gate
from mpjax.kernels.experts.kernels import products_by_kernel, why_not
from mpjax.kernels.experts.local import LocalExperts
from mpjax.kernels.experts.plans import (
    Problem,
    config_of,
    plan_by_rule,
    plan_of,
    warpgroup_config_of,
)
from mpjax.kernels.gradients import with_gradients_of
from mpjax.kernels.implementation import choose
from mpjax.kernels.quantized_tensor import QuantizedTensor

Implementation = Literal["triton", "mosaic", "reference"]


def grouped_matmul(
    x: jax.Array,
    weight: jax.Array | QuantizedTensor,
    experts: jax.Array | LocalExperts,
    *,
    routing_weights: jax.Array | None = None,
    bias: jax.Array | None = None,
    gate: Gate | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """The products of tokens with the matrices of the experts to which they are routed.

    Token t's j-th product is x[t] · weight[experts[t, j]], or x[t, j] · … if x has a row for each
    expert. On a GPU, only the matrices of chosen experts are loaded.

    x: [..., K], or [..., k, K]. weight: [experts, K, N], a stack of plain matrices, or a
        QuantizedTensor with one leading axis, in any weight format.
    experts: int [..., k], the indices of each token's experts; an expert may have any number of
        tokens, from none to all. With LocalExperts, experts outside of the weight add nothing to
        sums with routing weights, and load nothing; without routing weights, their products are
        undefined.
    routing_weights: [..., k]. If given, the result is the sum of a token's products times these
        weights, in the order of k; otherwise all products are returned.
    bias: [experts, N], added to the products, before a gate and routing weights.
    gate: combines the two halves of a product, gate and up.
    implementation: `triton`, the fused kernel, on a CUDA GPU of compute capability 8.0 or more, for
        x in bfloat16 or float16; `mosaic`, a warpgroup kernel for many tokens, only on compute
        capability 9.0; or `reference`, a loop over all experts in plain jnp in float32. By default
        the faster kernel that can run.

    Returns [..., k, N], with a gate [..., k, N / 2], and with routing weights without the axis k,
    in the dtype of x.
    Differentiable in reverse with respect to x, routing weights, the bias and a plain weight.
    Raises ValueError for shapes that don't fit and, if values are known, for experts out of range;
    and UnsupportedError, with the reason, if a forced implementation can't run.
    """
    call = read_call("grouped_matmul", x, weight, experts, Epilogue(bias, gate, routing_weights))
    found, dtype = _run(call, implementation), call.x.dtype
    if routing_weights is not None:
        found = found[0] if len(found) == 1 else found.astype(jnp.float32).sum(0)
    return found.astype(dtype).reshape(*call.tokens, *found.shape[1:])


def grouped_matmul_terms(
    x: jax.Array,
    weight: jax.Array | QuantizedTensor,
    experts: jax.Array | LocalExperts,
    routing_weights: jax.Array,
    *,
    bias: jax.Array | None = None,
    activations: DividedRows | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Terms float32 [terms, ..., N] that sum to the result of `grouped_matmul`.

    They are for a consumer that sums them itself, as `add_rms_norm` does. Arguments, errors and
    derivatives are as for `grouped_matmul` with routing weights.

    activations: how x is rounded if x and the weight have only some of the input channels; None if
        they have all. Its format must be that of the weight's activations.
    """
    if activations is not None:
        check_divided_rows("grouped_matmul_terms", activations, weight)
    weights = as_array("grouped_matmul_terms: routing_weights", routing_weights)
    call = read_call("grouped_matmul_terms", x, weight, experts, Epilogue(bias, None, weights))
    terms = _run(call, implementation, activations)
    return terms.reshape(len(terms), *call.tokens, terms.shape[-1])


def _run(
    call: Call, implementation: Implementation | None, rows: DividedRows | None = None
) -> jax.Array:
    """Products [tokens, k, N], or with routing weights terms float32 [terms, tokens, N]."""
    x, weight, experts, epilogue, *_ = call
    problem = Problem.of(experts.shape, weight, gated=epilogue.gate is not None, total=call.total)
    name = choose(
        "grouped_matmul",
        implementation,
        "reference" if x.size == 0 else _default(problem, x, weight),
        get_args(Implementation),
        lambda name: why_not(name, problem, x, weight),
    )
    if name != "reference":
        config = config_of(problem) if name == "triton" else warpgroup_config_of(problem)
        run = functools.partial(products_by_kernel, config, rows, call.is_local)
        return with_gradients_of(_sums, run, x, weight, experts, epilogue)
    found = reference.products(x, weight, experts, epilogue, rows)
    return found if epilogue.routing_weights is None else jnp.moveaxis(found, 1, 0)


def _sums(x: jax.Array, weight: Any, experts: jax.Array, epilogue: Epilogue) -> jax.Array:
    """Products [tokens, k, N], or with routing weights their sums [tokens, N]."""
    products = reference.products(x, weight, experts, epilogue)
    return products if epilogue.routing_weights is None else products.sum(1)


def _default(problem: Problem, x: jax.Array, weight: Any) -> str:
    """The planned implementation, or the next best if it can't run the call."""
    name = plan_of(problem).implementation
    if name == "mosaic" and why_not(name, problem, x, weight) is not None:
        return plan_by_rule(problem, warpgroups=False).implementation
    return name
