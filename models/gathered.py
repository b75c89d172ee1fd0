"""Arrays that are divided among devices, and joined when NumPy needs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class Gathered:
    """An array whose shares are fetched and joined on conversion to NumPy.

    like: its shape and dtype. join: returns the joined array.
    """

    def __init__(self, like: jax.ShapeDtypeStruct, join: Callable[[], Any]) -> None:
        self.shape, self.dtype, self.ndim, self.size = like.shape, like.dtype, like.ndim, like.size
        self.nbytes = like.size * like.dtype.itemsize
        self._join = join

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The joined array, on the host."""
        return np.asarray(self._join(), dtype)


def gather(tree: Any) -> Any:
    """The tree with each Gathered array joined to a JAX array on the default device."""
    return _replace(tree, lambda leaf: jnp.asarray(np.asarray(leaf)))


def abstract(tree: Any) -> Any:
    """The tree with zeros instead of Gathered arrays, for use under `jax.eval_shape`."""
    return _replace(tree, lambda leaf: jnp.zeros(leaf.shape, leaf.dtype))


def _replace(tree: Any, function: Callable[[Gathered], jax.Array]) -> Any:
    return jax.tree.map(lambda leaf: function(leaf) if isinstance(leaf, Gathered) else leaf, tree)
