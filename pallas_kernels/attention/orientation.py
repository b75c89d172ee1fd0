"""The orientation of attention's tiles in tensor-core instructions."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from mpjax.kernels.target import current_target


@dataclasses.dataclass(frozen=True)
class Orientation:
    """The order of a tile's two axes: rows of queries, and slots of keys or channels of values.

    The tensor-core instruction has one narrow side, of eight.

    few_rows: whether rows are on the narrow side. Then scores and softmax weights are [slots,
        rows], and sums of values [channels, rows]. Otherwise slots and channels are on the narrow
        side, and tiles are [rows, slots] and [rows, channels].
    """

    few_rows: bool

    @property
    def slots(self) -> int:
        """The axis of a tile's slots or channels."""
        return 0 if self.few_rows else 1

    @property
    def rows(self) -> int:
        """The axis of a tile's rows."""
        return 1 - self.slots

    def shape(self, slots: int, rows: int) -> tuple[int, int]:
        """The shape of a tile with `slots` slots or channels and `rows` rows."""
        return (slots, rows) if self.few_rows else (rows, slots)

    def for_slots(self, x: jax.Array) -> jax.Array:
        """Expands an array [slots] to broadcast over the rows of a tile."""
        return jnp.expand_dims(x, self.rows)

    def for_rows(self, x: jax.Array) -> jax.Array:
        """Expands an array [rows] to broadcast over the slots of a tile; keeps a scalar."""
        return jnp.expand_dims(x, self.slots) if x.ndim else x

    def times_queries(self, keys: jax.Array, queries: jax.Array) -> jax.Array:
        """The tile of products of keys [slots, channels] and queries [rows, channels]."""
        return current_target().dot(
            *((keys, queries) if self.few_rows else (queries, keys)), trans_b=True
        )

    def times_values(self, weights: jax.Array, values: jax.Array) -> jax.Array:
        """The tile of sums over slots of values times softmax weights.

        weights: a tile of slots and rows. values: [channels, slots] if `few_rows`, else
        [slots, channels].
        """
        return current_target().dot(*((values, weights) if self.few_rows else (weights, values)))
