"""Arrays that are divided among devices, and joined when NumPy needs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels import QuantizedTensor
from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.packed_shapes import packed_shapes


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


def on_host_of_cpu(tree: Any) -> Any:
    """Arrays on a CPU as NumPy arrays, which share memory and are sliced without compilation."""

    def convert(array: Any) -> Any:
        on_cpu = {device.platform for device in array.devices()} == {"cpu"}
        return np.asarray(array) if on_cpu else array

    return jax.tree.map(convert, tree)


def whole_shape(
    kernel: Any, shape: tuple[int, ...], format: WeightFormat | None
) -> jax.ShapeDtypeStruct | QuantizedTensor:
    """The whole kernel of this shape and format, to which `kernel` of a share belongs."""
    if format is None:
        return jax.ShapeDtypeStruct(shape, kernel.dtype)
    return packed_shapes(
        *(shape, format, kernel.scale_dtype),
        permuted=kernel.permutation is not None,
        mixed=kernel.activation_bits is not None,
        static=kernel.activation_scale is not None,
    )


def bias_shape(bias: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct | None:
    """The bias of a whole kernel of this shape, as a share has one; None without."""
    return None if bias is None else jax.ShapeDtypeStruct((*shape[:-2], shape[-1]), bias.dtype)


def _replace(tree: Any, function: Callable[[Gathered], jax.Array]) -> Any:
    return jax.tree.map(lambda leaf: function(leaf) if isinstance(leaf, Gathered) else leaf, tree)
