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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def with_gradients_of(
    run: Callable[..., jax.Array], reference: Callable[..., jax.Array], *arguments: Any
) -> jax.Array:
    """The result of run(*arguments), with the derivatives of `reference`, which is as exact."""
    return run(*arguments)


def _forward_of(run: Any, reference: Any, *arguments: Any) -> tuple[jax.Array, Any]:
    return with_gradients_of(run, reference, *arguments), arguments


def _backward_of(run: Any, reference: Any, arguments: Any, gradient: jax.Array) -> Any:
    return jax.vjp(reference, *arguments)[1](gradient)


with_gradients_of.defvjp(_forward_of, _backward_of)
