"""A filter for the part of a model that gradients reach."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def trainable(path: tuple[Any, ...], value: Any) -> bool:
    """Whether a variable can be trained: a filter for `nnx.split`, `nnx.state`, `nnx.DiffState`.

    True for every nnx.Param of floating-point arrays, adapters and learned scales among them. False
    for an nnx.Param that holds a packed weight, because codes have no derivative, and for other
    variables, such as Packed and CacheScales.

        gradients = nnx.grad(loss, argnums=nnx.DiffState(0, trainable))(model, tokens)
        structure, parameters, rest = nnx.split(model, trainable, ...)
    """
    if not isinstance(value, nnx.Param):
        return False
    leaves = jax.tree.leaves(value.get_value())
    return all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves)
