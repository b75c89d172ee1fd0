"""The part of a model that gradients reach."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def trainable(path: tuple[Any, ...], value: Any) -> bool:
    """A filter for `nnx.split`, `nnx.state` and `nnx.DiffState`: parameters that are plain numbers.

    These are every nnx.Param, adapters and learned scales among them, but for one that somebody
    filled with a packed weight, whose codes have no derivative; and no other variable, such as
    Packed and CacheScales.

        gradients = nnx.grad(loss, argnums=nnx.DiffState(0, trainable))(model, tokens)
        structure, parameters, rest = nnx.split(model, trainable, ...)
    """
    if not isinstance(value, nnx.Param):
        return False
    leaves = jax.tree.leaves(value.get_value())
    return all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves)
