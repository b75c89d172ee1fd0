"""The mesh axes along which arrays vary under `shard_map`, in the arguments and outputs of kernels.

`shard_map` tracks in an array's type along which axes of the mesh its shards may differ. Pallas
requires that all arguments of a kernel vary along the same axes, and that the types of outputs
declare these axes.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax

Tree = TypeVar("Tree")


def vary_alike(tree: Tree) -> Tree:
    """Marks the arrays of a tree as varying along every axis along which any of them varies.

    So the derivative of an argument that is equal in all shards is a sum over shards, as in JAX's
    own operations. Outside of `shard_map`, and inside with `check_vma=False`, arrays vary along no
    axis, and the tree is returned unchanged.
    """
    axes = frozenset().union(*(_axes_of(array).varying for array in jax.tree.leaves(tree)))

    def vary(array: Any) -> Any:
        missing = axes - _axes_of(array).varying
        return jax.lax.pcast(array, tuple(missing), to="varying") if missing else array

    return jax.tree.map(vary, tree) if axes else tree


def varying_like(shapes: Tree, arguments: Any) -> Tree:
    """Marks shapes of outputs as varying along the same axes as `arguments`, from `vary_alike`."""
    first = next(iter(jax.tree.leaves(arguments)), None)
    if first is None or not (axes := _axes_of(first)).varying:
        return shapes

    def varying(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, manual_axis_type=axes)

    return jax.tree.map(varying, shapes)


def _axes_of(array: Any) -> Any:
    """The part of an array's type with its axes; `varying` is the set of their names."""
    array_type: Any = jax.typeof(array)
    return array_type.manual_axis_type
