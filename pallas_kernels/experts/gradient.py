"""The gradients of grouped products: those of their references."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from mpjax.kernels.experts import reference
from mpjax.kernels.experts.epilogue import Epilogue


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def differentiable(
    run: Callable[..., jax.Array], x: jax.Array, weight: Any, experts: jax.Array, epilogue: Epilogue
) -> jax.Array:
    """The result of run(x, weight, experts, epilogue), with the reference's derivatives.

    run: gives products [tokens, k, N], or with routing weights terms [terms, tokens, N]. Terms have
    the derivatives of their sum.
    """
    return run(x, weight, experts, epilogue)


def _forward(run: Callable[..., jax.Array], *arguments: Any) -> tuple[jax.Array, Any]:
    return differentiable(run, *arguments), arguments


def _backward(run: Callable[..., jax.Array], arguments: Any, gradient: jax.Array) -> Any:
    *_, epilogue = arguments
    is_sum = epilogue.routing_weights is not None
    if is_sum:  # a consumer that adds up the terms has the same gradient for each
        gradient = gradient.mean(0)

    def compute(*arguments: Any) -> jax.Array:
        products = reference.products(*arguments)
        return (products.sum(1) if is_sum else products).astype(gradient.dtype)

    return jax.vjp(compute, *arguments)[1](gradient)


differentiable.defvjp(_forward, _backward)
