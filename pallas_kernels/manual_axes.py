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
    axes = frozenset().union(*map(_varying, jax.tree.leaves(tree)))

    def vary(array: Any) -> Any:
        missing = axes - _varying(array)
        return jax.lax.pcast(array, tuple(missing), to="varying") if missing else array

    return jax.tree.map(vary, tree) if axes else tree


def like(shapes: Tree, arguments: Any) -> Tree:
    """Shapes of outputs that vary like arguments, which `vary_alike` gave."""
    first = next(iter(jax.tree.leaves(arguments)), None)
    if first is None or not _varying(first):
        return shapes
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(
            shape.shape, shape.dtype, manual_axis_type=_type(first).manual_axis_type
        ),
        shapes,
    )


def _varying(array: Any) -> frozenset[str]:
    return frozenset(_type(array).manual_axis_type.varying)


def _type(array: Any) -> Any:
    return jax.typeof(array)
