"""Arrays under `shard_map`, which may vary along axes of the mesh: differ from shard to shard."""

from __future__ import annotations

from typing import Any, TypeVar

import jax

Tree = TypeVar("Tree")


def vary_alike(tree: Tree) -> Tree:
    """The arrays of a tree, each as varying along all axes along which one of them varies.

    A kernel's output varies like all of its arguments, and the derivative of an argument that is
    the same in all shards is a sum over these, as in JAX's own operations. Elsewhere, and where
    `shard_map` doesn't check it, nothing varies, and nothing changes.
    """
    axes = frozenset().union(*(_manual(array).varying for array in jax.tree.leaves(tree)))

    def vary(array: Any) -> Any:
        missing = axes - _manual(array).varying
        return jax.lax.pcast(array, tuple(missing), to="varying") if missing else array

    return jax.tree.map(vary, tree) if axes else tree


def varying_like(shapes: Tree, arguments: Any) -> Tree:
    """Shapes of outputs that vary like arguments, which `vary_alike` gave."""
    first = next(iter(jax.tree.leaves(arguments)), None)
    if first is None or not (manual := _manual(first)).varying:
        return shapes

    def varying(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, manual_axis_type=manual)

    return jax.tree.map(varying, shapes)


def _manual(array: Any) -> Any:
    kind: Any = jax.typeof(array)
    return kind.manual_axis_type
