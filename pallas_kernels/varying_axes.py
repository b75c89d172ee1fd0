"""The mesh axes along which arrays vary under `shard_map`, in the arguments and outputs of kernels.

`shard_map` tracks in an array's type along which axes of the mesh its shards may differ. Pallas
wants all arguments of a kernel to vary along the same axes, and the types of outputs to say so.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax

Tree = TypeVar("Tree")


def vary_alike(tree: Tree) -> Tree:
    """Marks the arrays of a tree as varying along every axis along which one of them varies.

    So the derivative of an argument that is the same in all shards is a sum over shards, as in
    JAX's own operations. Outside of `shard_map`, and inside with `check_vma=False`, arrays vary
    along no axis, and the tree is returned unchanged.
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
    """The part of an array's type that holds its axes; `varying` is their set of names."""
    array_type: Any = jax.typeof(array)
    return array_type.manual_axis_type
