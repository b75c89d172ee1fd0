"""The first product of experts for few tokens, whose kernel also chooses the tokens' experts."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from mpjax.kernels.experts import choosing, triton
from mpjax.kernels.experts.api import grouped_matmul
from mpjax.kernels.experts.epilogue import Epilogue
from mpjax.kernels.experts.gate import Gate
from mpjax.kernels.experts.kernels import in_packed_order, why_not
from mpjax.kernels.experts.logits import RouterLogits
from mpjax.kernels.experts.plans import ExpertsConfig, Problem, plan_of
from mpjax.kernels.experts.routing import route
from mpjax.kernels.gradients import with_gradients_of
from mpjax.kernels.quantized_tensor import QuantizedTensor

# The products [..., k, I], the experts int32 [..., k] of tokens, and their weights float32.
Routed = tuple[jax.Array, jax.Array, jax.Array]


def routed_products(
    x: jax.Array,
    weight: jax.Array | QuantizedTensor,
    logits: RouterLogits,
    gate: Gate,
    bias: jax.Array | None,
) -> Routed | None:
    """The gated products of tokens with the experts to which they are routed, by one kernel.

    x: [..., K]. Other arguments are as for `grouped_matmul`. Returns None if the plan is not
    Triton's kernel with a tile for each pair, if the kernel can't choose experts, or if shapes
    don't fit. Differentiable as `route` and `grouped_matmul` are.
    """
    config = _config(x, weight, logits, bias)
    if config is None:
        return None
    tokens, per_token = x.shape[:-1], logits.routing.per_token
    rows = logits.logits.reshape(-1, logits.logits.shape[-1])
    flat = dataclasses.replace(logits, logits=rows, gain=None)  # the caller applies the gains

    def by_kernel(x: jax.Array, weight: Any, logits: RouterLogits, bias: Any) -> Any:
        rows, weight = in_packed_order(x, weight, None, None)
        epilogue = Epilogue(bias, gate)
        [found], *chosen = triton.routed_products(rows, weight, logits, epilogue, config, x.dtype)
        return found.reshape(-1, per_token, found.shape[-1]), *chosen

    def reference(x: jax.Array, weight: Any, logits: RouterLogits, bias: Any) -> Any:
        own = logits.logits, logits.routing, logits.correction, logits.bias
        experts, weights = route(*own, implementation="reference")
        multiply = functools.partial(grouped_matmul, implementation="reference")
        return multiply(x, weight, experts, bias=bias, gate=gate), experts, weights

    rows = x.reshape(-1, x.shape[-1])
    found: Any = with_gradients_of(reference, by_kernel, rows, weight, flat, bias)
    inner, experts, weights = (array.reshape(*tokens, *array.shape[1:]) for array in found)
    return inner, experts, weights


def _config(
    x: Any, weight: Any, logits: RouterLogits, bias: jax.Array | None
) -> ExpertsConfig | None:
    """The configuration with which the kernel runs, or None if it doesn't."""
    if not _fits(x, weight, logits, bias):
        return None
    routing, experts = logits.routing, weight.shape[0]
    corrected = logits.correction is not None
    if routing.why_not(experts) or choosing.why_not(routing, experts, corrected=corrected):
        return None
    tokens = x.size // x.shape[-1]
    problem = Problem.of((tokens, routing.per_token), weight, gated=True)
    plan = plan_of(problem)
    if plan.implementation != "triton" or why_not("triton", problem, x, weight) is not None:
        return None
    config = plan.config
    is_whole = isinstance(config, ExpertsConfig) and config.splits == 1
    return config if is_whole and config.tiling == "pairs" else None


def _fits(x: Any, weight: Any, logits: RouterLogits, bias: jax.Array | None) -> bool:
    """Whether shapes fit, and all experts use the same rows: in one order, rounded in one way."""
    if not isinstance(weight, jax.Array | QuantizedTensor) or len(weight.shape) != 3:
        return False
    if logits.chosen is not None:
        return False
    if isinstance(weight, QuantizedTensor) and not (
        weight.permutation is None and weight.activation_bits is None
    ):
        return False
    experts, channels, outputs = weight.shape
    given: Any = logits.logits
    return bool(
        x.size
        and x.shape == (*given.shape[:-1], channels)
        and given.shape[-1:] == (experts,)
        and outputs % 2 == 0
        and (bias is None or bias.shape == (experts, outputs))
        and (logits.bias is None or logits.bias.shape == (experts,))
    )
