"""The slots of a step's rows in the states of all sequences."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.kernels.checks import as_arrays, shown


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["slots", "is_new", "begins", "counts"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class StateRows:
    """The slots of rows in arrays of states [slots, ...].

    slots: int32 [rows], all different. A row whose slot is out of range has no token: no state
        changes, and its outputs are undefined.
    is_new: bool [rows], whether a row's state begins with zeros, whatever its slot contains.
    begins, counts: int32 [rows], the first token of each row, and the number of its tokens, which a
        step then processes one after another. Outputs of other tokens are undefined. None: row i
        has token i.
    """

    slots: Any
    is_new: Any
    begins: Any = None
    counts: Any = None

    def read(self, operation: str, tokens: int) -> StateRows:
        """The rows as arrays. Raises ValueError for other shapes and dtypes."""
        slots, is_new = as_arrays(operation, slots=self.slots, is_new=self.is_new)
        rows = tokens if self.begins is None else slots.size
        is_whole = jnp.issubdtype(slots.dtype, jnp.integer)
        if not is_whole or is_new.dtype != bool or {slots.shape, is_new.shape} != {(rows,)}:
            raise ValueError(
                f"{operation}: slots and is_new are {shown(slots)} and {shown(is_new)}: expected "
                f"int32 and bool of shape {(rows,)}"
            )
        found = StateRows(slots.astype(jnp.int32), is_new)
        if self.begins is None and self.counts is None:
            return found
        begins, counts = as_arrays(operation, begins=self.begins, counts=self.counts)
        are_whole = all(jnp.issubdtype(x.dtype, jnp.integer) for x in (begins, counts))
        if not are_whole or {begins.shape, counts.shape} != {(rows,)}:
            raise ValueError(
                f"{operation}: begins and counts are {shown(begins)} and {shown(counts)}: expected "
                f"int32 of shape {(rows,)}"
            )
        return dataclasses.replace(
            found, begins=begins.astype(jnp.int32), counts=counts.astype(jnp.int32)
        )

    def take(self, states: jax.Array) -> jax.Array:
        """The states of the rows, [rows, ...]; zeros for new rows."""
        rows = states.at[self.slots].get(mode="clip")
        is_new = jax.lax.expand_dims(self.is_new, range(1, rows.ndim))
        return jnp.where(is_new, jnp.zeros_like(rows), rows)

    def put(self, states: jax.Array, rows: jax.Array) -> jax.Array:
        """The states with the rows' states [rows, ...] written to their slots."""
        return states.at[self.slots].set(rows.astype(states.dtype), mode="drop")
