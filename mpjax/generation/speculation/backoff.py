"""Back-off: the number of tokens without proposals after rejected proposals."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

REFUSALS = 4  # consecutive rejections after which the back-off stops growing


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["refused", "resume"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Backoff:
    """The back-off of rows: 0, 2, 6 and then 14 tokens after one, two, three, four rejections.

    If all proposals are rejected, at most one step in fifteen verifies a proposal. A proposal
    counts as rejected if none of its tokens is accepted.

    refused: int32 [batch], proposals rejected since the last accepted one. resume: int32 [batch],
    the length at which a row gets proposals again.
    """

    refused: jax.Array
    resume: jax.Array

    @classmethod
    def create(cls, batch: int) -> Backoff:
        """The back-off of rows without rejections."""
        return cls(jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.int32))

    def is_over(self, known: jax.Array) -> jax.Array:
        """Whether each row may get a proposal, bool [batch]. known: its length, int32 [batch]."""
        return known >= self.resume

    def settled(self, known: jax.Array, proposed: jax.Array, accepted: jax.Array) -> Backoff:
        """The back-off after a step; all arguments are int32 [batch].

        known: length of each row when the proposal was made. proposed, accepted: numbers of
        proposed and of accepted tokens.
        """
        was_proposed = proposed > 0
        is_refused = was_proposed & (accepted == 0)
        refused = jnp.where(was_proposed, 0, self.refused)
        refused = jnp.where(is_refused, jnp.minimum(self.refused + 1, REFUSALS), refused)
        # After a rejection the row has one more token, drawn from the model.
        resume = known + 1 + (1 << refused) - 2
        return Backoff(refused, jnp.where(is_refused, resume, self.resume))
