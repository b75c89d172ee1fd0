"""Back-off: for how many tokens a row gets no proposal after the model has rejected some."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

REFUSALS = 4  # rejections in a row after which the wait grows no more


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["refused", "resume"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Backoff:
    """The back-off of rows: 0, 2, 6 and then 14 tokens after one, two, three, four rejections.

    So if all proposals are rejected, at most one step of fifteen verifies one. A proposal is
    rejected if none of its tokens is accepted.

    refused: int32 [batch], proposals rejected since the last accepted one. resume: int32 [batch],
    the number of tokens from which on a row gets proposals again.
    """

    refused: jax.Array
    resume: jax.Array

    @classmethod
    def create(cls, batch: int) -> Backoff:
        """The back-off of rows without rejections."""
        return cls(jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.int32))

    def is_over(self, known: jax.Array) -> jax.Array:
        """Whether each row may get a proposal, bool [batch]; known: its tokens, int32 [batch]."""
        return known >= self.resume

    def settled(self, known: jax.Array, proposed: jax.Array, accepted: jax.Array) -> Backoff:
        """The back-off after a step; all arguments are int32 [batch].

        known: tokens of each row when the proposal was made. proposed, accepted: numbers of tokens
        of the proposal.
        """
        was_proposed = proposed > 0
        is_refused = was_proposed & (accepted == 0)
        refused = jnp.where(was_proposed, 0, self.refused)
        refused = jnp.where(is_refused, jnp.minimum(self.refused + 1, REFUSALS), refused)
        # The row has one token more after a refusal, the model's own.
        resume = known + 1 + (1 << refused) - 2
        return Backoff(refused, jnp.where(is_refused, resume, self.resume))
