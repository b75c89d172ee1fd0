"""Stacks the linear maps of experts into one Linear, expert by expert, and unstacks them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels import QuantizedTensor
from mpjax.models.join import join
from mpjax.models.layers import Linear

Arrays = tuple[jax.Array | QuantizedTensor, jax.Array | None]  # a kernel and a bias


def stack(maps: Iterable[Linear], names: Sequence[str], count: int) -> Linear:
    """One Linear with a kernel [experts, in, out] and a bias [experts, out] or None.

    maps: of one expert after another, `count` of each, which are joined along their outputs. Each
    expert's maps are copied into the stack before the next expert's are taken from `maps`, so that
    memory has the stack and one expert. names: of all maps, for messages.

    Raises ValueError if the formats of one expert's maps, or of two experts, can't be multiplied by
    one product.
    """
    taken, stacked = iter(maps), Stack(len(names) // count)
    for expert in range(len(names) // count):
        ours = names[expert * count : (expert + 1) * count]
        joined = join(list(itertools.islice(taken, count)))
        if len(joined) > 1:
            kinds = " and ".join(_describe(_arrays(each)[0]) for each in joined)
            raise ValueError(
                f"{' and '.join(ours)} have the formats {kinds}: expected one format, and with a "
                "permutation of channels the same one, for all maps of an expert"
            )
        one = jax.tree.map(lambda leaf: leaf[None], _arrays(joined[0]))
        stacked.put(one, expert, ours[0])
    return Linear(*stacked.arrays)


class Stack:
    """The stacked arrays of experts; `put` adds some experts at a time.

    size: the number of experts; experts that are never put are zeros. device: of the stack; None
    for the default device.
    """

    def __init__(self, size: int, device: jax.Device | None = None) -> None:
        self._size, self._device = size, device
        self._total: Arrays | None = None
        self._name = ""

    @property
    def arrays(self) -> Arrays:
        """The kernel and the bias of all experts."""
        assert self._total is not None
        return self._total

    def put(self, some: Arrays, begin: int, name: str) -> None:
        """Copies a kernel and a bias [experts, ...] of some experts into the stack from `begin` on.

        name: of the first of these experts, for messages.

        Raises ValueError if their format is not that of the earlier experts.
        """
        if self._total is None:
            self._name = name
            self._total = jax.tree.map(
                lambda leaf: jnp.zeros(
                    (self._size, *leaf.shape[1:]), leaf.dtype, device=self._device
                ),
                some,
            )
        total, some = _with_one_symmetry(self._total, some)
        if not _are_alike(total, some):
            raise ValueError(
                f"{name} is {_describe(some[0])}, and {self._name} is {_describe(total[0])}: "
                "expected one format for all experts of a layer"
            )
        self._total = _insert(total, some, begin)


def unstack(stacked: Linear, experts: int) -> list[Linear]:
    """One Linear for each expert: undoes `stack`, but doesn't split joined maps."""
    arrays = _arrays(stacked)
    return [
        Linear(*jax.tree.map(lambda leaf, i=expert: leaf[i], arrays)) for expert in range(experts)
    ]


def halves_of(linear: Linear) -> Linear:
    """A map with its outputs reordered: those of even index first, then those of odd index."""
    return _reorder(linear, lambda count: np.arange(count).reshape(-1, 2).T.reshape(-1))


def alternating(linear: Linear) -> Linear:
    """The inverse of `halves_of`."""
    return _reorder(linear, lambda count: np.arange(count).reshape(2, -1).T.reshape(-1))


def _reorder(linear: Linear, order_of: Callable[[int], np.ndarray]) -> Linear:
    """A map with its outputs in the order `order_of(number of outputs)`."""
    kernel, bias = _arrays(linear)
    order = jnp.asarray(order_of(kernel.shape[-1]))
    if not isinstance(kernel, QuantizedTensor):
        reordered: Any = jnp.take(kernel, order, axis=-1)
    else:
        scales = kernel.channel_scales
        reordered = dataclasses.replace(
            kernel,
            words=jnp.take(kernel.words, order, axis=-2),
            parameters=jnp.take(kernel.parameters, order, axis=-1),
            channel_scales=None if scales is None else jnp.take(scales, order, axis=-1),
        )
    return Linear(reordered, None if bias is None else jnp.take(bias, order, axis=-1))


def _arrays(linear: Linear) -> Arrays:
    kernel: Any = linear.kernel.get_value()
    return kernel, None if linear.bias is None else linear.bias.get_value()


def _with_one_symmetry(total: Arrays, some: Arrays) -> tuple[Arrays, Arrays]:
    """Declares both formats asymmetric if one is; weights stay the same (see `join`)."""
    first, second = total[0], some[0]
    if not isinstance(first, QuantizedTensor) or not isinstance(second, QuantizedTensor):
        return total, some
    symmetric = first.format.symmetric and second.format.symmetric

    def declare(kernel: QuantizedTensor) -> QuantizedTensor:
        format = dataclasses.replace(kernel.format, symmetric=symmetric)
        return dataclasses.replace(kernel, format=format)

    return (declare(first), total[1]), (declare(second), some[1])


def _are_alike(total: Arrays, some: Arrays) -> bool:
    """Whether the shapes, dtypes and static fields of some experts match those of the stack."""
    structures: list[Any] = [jax.tree.structure(arrays) for arrays in (total, some)]
    leaves = zip(jax.tree.leaves(total), jax.tree.leaves(some), strict=False)
    return structures[0] == structures[1] and all(
        (all_.shape[1:], all_.dtype) == (leaf.shape[1:], leaf.dtype) for all_, leaf in leaves
    )


def _describe(kernel: jax.Array | QuantizedTensor) -> str:
    if not isinstance(kernel, QuantizedTensor):
        return str(kernel.dtype)
    permuted = ", permuted" if kernel.permutation is not None else ""
    return f"{kernel.format} with {kernel.scale_dtype} scales{permuted}"


# The stack is donated, so that experts are written into it in place.
@functools.partial(jax.jit, donate_argnums=0)
def _insert(total: Arrays, some: Arrays, begin: int) -> Arrays:
    return jax.tree.map(
        lambda all_, leaf: jax.lax.dynamic_update_slice_in_dim(all_, leaf, begin, 0), total, some
    )
