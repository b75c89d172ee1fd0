"""Which way round the tiles of attention lie in the tensor cores."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from mpjax.kernels.target import current_target


@dataclasses.dataclass(frozen=True)
class Orientation:
    """Which operand of the tensor cores is the narrow one, eight high.

    few_rows: whether it is the rows, of queries; where there are many, it is the slots, of keys and
        values. A tile has both: scores, and weights, are [slots, rows] or [rows, slots], and sums
        of values [channels, rows] or [rows, channels].
    """

    few_rows: bool

    @property
    def slots(self) -> int:
        """The axis of a tile along which its slots lie."""
        return 0 if self.few_rows else 1

    @property
    def rows(self) -> int:
        """The axis of a tile along which its rows lie."""
        return 1 - self.slots

    def shape(self, slots: int, rows: int) -> tuple[int, int]:
        """That of a tile of so many slots, or channels, and rows."""
        return (slots, rows) if self.few_rows else (rows, slots)

    def for_slots(self, x: jax.Array) -> jax.Array:
        """What each slot has, [slots], for all rows of a tile."""
        return jnp.expand_dims(x, self.rows)

    def for_rows(self, x: jax.Array) -> jax.Array:
        """What each row has, [rows], or all have, [], for all slots of a tile."""
        return jnp.expand_dims(x, self.slots) if x.ndim else x

    def times_queries(self, keys: jax.Array, queries: jax.Array) -> jax.Array:
        """The products of keys [slots, channels] and queries [rows, channels], a tile."""
        return current_target().dot(
            *((keys, queries) if self.few_rows else (queries, keys)), trans_b=True
        )

    def times_values(self, weights: jax.Array, values: jax.Array) -> jax.Array:
        """Sums of values with weights, a tile; of values, slots lie along the axis of rows."""
        return current_target().dot(*((values, weights) if self.few_rows else (weights, values)))
