"""Arrays that are divided among devices, and joined when NumPy reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class Gathered:
    """An array whose shares are read and joined when NumPy reads it.

    like: its shape and dtype. join: makes it.
    """

    def __init__(self, like: jax.ShapeDtypeStruct, join: Callable[[], Any]) -> None:
        self.shape, self.dtype, self.ndim, self.size = like.shape, like.dtype, like.ndim, like.size
        self.nbytes = like.size * like.dtype.itemsize
        self._join = join

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The numbers, on the host."""
        return np.asarray(self._join(), dtype)


def gather(tree: Any) -> Any:
    """The tree with JAX arrays, on the default device, instead of Gathered ones."""
    return _replace(tree, lambda leaf: jnp.asarray(np.asarray(leaf)))


def abstract(tree: Any) -> Any:
    """The tree with zeros instead of Gathered arrays, for use under `jax.eval_shape`."""
    return _replace(tree, lambda leaf: jnp.zeros(leaf.shape, leaf.dtype))


def _replace(tree: Any, function: Callable[[Gathered], jax.Array]) -> Any:
    return jax.tree.map(lambda leaf: function(leaf) if isinstance(leaf, Gathered) else leaf, tree)
