"""The experts of tokens, for a stack that has only some of the experts."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.kernels.checks import as_array, shown, whole_number


@functools.partial(jax.tree_util.register_dataclass, data_fields=["numbers"], meta_fields=["total"])
@dataclasses.dataclass(frozen=True)
class LocalExperts:
    """The experts of tokens, as indices of a stack that has only some of the experts.

    numbers: int32 [..., k], indices of the stack; −1 for an expert outside of it.
    total: the number of all experts (static), from which plans estimate the tokens per expert; None
        to plan as if the stack had all of them.
    """

    numbers: jax.Array
    total: int | None = None

    def __post_init__(self) -> None:
        if self.total is not None:
            whole_number("LocalExperts: total", self.total)

    @classmethod
    def of(
        cls, experts: jax.Array, first: int | jax.Array, count: int, total: int | None = None
    ) -> LocalExperts:
        """The experts of tokens for a stack of the experts [first, first + count).

        experts: int [..., k], indices among all experts. first: an int, or an int scalar on the
        device.
        total: the number of all experts, if it is known; no result depends on it.
        Raises ValueError for anything else.
        """
        count = whole_number("LocalExperts: count", count)
        if total is not None:
            total = whole_number("LocalExperts: total", total, count)
        numbers = _integers("experts", experts)
        begin = _integers("first", first)
        if begin.ndim:
            raise ValueError(f"LocalExperts: first is {shown(first)}: expected a whole number")
        places = numbers - begin
        return cls(jnp.where((places >= 0) & (places < count), places, -1), total)


def _integers(name: str, value: Any) -> jax.Array:
    array = as_array(f"LocalExperts: {name}", value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"LocalExperts: {name} is {shown(value)}: expected whole numbers")
    return jnp.asarray(array, jnp.int32)
