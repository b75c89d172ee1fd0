"""The derivatives of kernels: those of an equivalent reference."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def with_gradients_of(
    reference: Callable[..., Any], kernel: Callable[..., Any], *arguments: Any
) -> Any:
    """The result of kernel(*arguments), with the derivatives of reference(*arguments).

    The kernel may return terms [terms, …] of the reference's result […], in another dtype. They
    have the derivatives of their sum.
    """
    return kernel(*arguments)


def _forward(
    reference: Callable[..., Any], kernel: Callable[..., Any], *arguments: Any
) -> tuple[Any, Any]:
    return with_gradients_of(reference, kernel, *arguments), arguments


def _backward(
    reference: Callable[..., Any], kernel: Callable[..., Any], saved: Any, gradients: Any
) -> Any:
    result, pull_back = jax.vjp(reference, *saved)

    def of_result(gradient: jax.Array, result: jax.Array) -> jax.Array:
        if gradient.dtype == jax.dtypes.float0:  # of integers
            return gradient
        if gradient.ndim > result.ndim:  # the terms are summed, so each has the gradient of the sum
            gradient = gradient.mean(0)
        return gradient.astype(result.dtype)

    return pull_back(jax.tree.map(of_result, gradients, result))


with_gradients_of.defvjp(_forward, _backward)
