"""Embedding and head whose token ids are divided among devices (vocabulary-parallel)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from mpjax.kernels.invariance import is_batch_invariant
from mpjax.models.device_sums import add_over_devices

NEVER = -1e30  # a logit whose probability is 0 beside any other


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The token ids of a model, and their division among devices.

    size: the number of ids. axis: the mesh axis that divides them evenly, under `shard_map`; None
    if each device has all.
    """

    size: int
    axis: str | None = None

    def embed(self, look_up: Callable[..., jax.Array], tokens: jax.Array) -> jax.Array:
        """The rows [..., hidden] of token ids [...] in a table that is divided among devices.

        look_up: returns rows of this device's table for `tokens=`, indices of that table.
        """
        if self.axis is None:
            return look_up(tokens=tokens)
        rows = -(-self.size // jax.lax.axis_size(self.axis))
        own = tokens - jax.lax.axis_index(self.axis).astype(tokens.dtype) * rows
        is_mine = (own >= 0) & (own < rows)
        found = look_up(tokens=jnp.clip(own, 0, rows - 1))
        found = jnp.where(is_mine[..., None], found, jnp.zeros_like(found))
        # All devices but one add zeros, so the sum is exact.
        return add_over_devices(found, self.axis)

    def spread(self, logits: jax.Array, ids: jax.Array) -> jax.Array:
        """This device's columns [..., columns] of the logits [..., ids] of some tokens.

        ids: int32 [ids], the tokens. Others get NEVER, which is finite: where only they are
        allowed, a distribution remains.
        """
        columns, own = self.size, ids
        if self.axis is not None:
            columns = -(-self.size // jax.lax.axis_size(self.axis))
            own = ids - jax.lax.axis_index(self.axis).astype(ids.dtype) * columns
            own = jnp.where(own < 0, columns, own)  # a negative index would count from the end
        wide = jnp.full((*logits.shape[:-1], columns), NEVER, jnp.float32)
        wide = wide.at[..., own].set(logits.astype(jnp.float32), mode="drop", unique_indices=True)
        return self.mask(wide)

    def mask(self, logits: jax.Array) -> jax.Array:
        """This device's logits [..., columns], with -inf in columns beyond the vocabulary.

        In a batch-invariant context those of all devices, so that sums over them have one order.
        """
        if self.axis is None:
            return logits
        columns = logits.shape[-1]
        ids = jax.lax.axis_index(self.axis) * columns + jnp.arange(columns, dtype=jnp.int32)
        is_token = jax.lax.broadcast_to_rank(ids < self.size, logits.ndim)
        logits = jnp.where(is_token, logits, -jnp.inf)
        if not is_batch_invariant():
            return logits
        return jax.lax.all_gather(logits, self.axis, axis=logits.ndim - 1, tiled=True)
