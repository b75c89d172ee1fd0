"""A filter for the trainable part of a model."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def trainable(path: tuple[Any, ...], value: Any) -> bool:
    """Whether a variable can be trained: a filter for `nnx.split`, `nnx.state`, `nnx.DiffState`.

    True for every nnx.Param of floating-point arrays, including adapters and learned scales. False
    for an nnx.Param with a packed weight, because codes have no derivative, and for other
    variables, such as Packed and CacheScales.

        gradients = nnx.grad(loss, argnums=nnx.DiffState(0, trainable))(model, tokens)
        structure, parameters, rest = nnx.split(model, trainable, ...)
    """
    if not isinstance(value, nnx.Param):
        return False
    leaves = jax.tree.leaves(value.get_value())
    return all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves)
