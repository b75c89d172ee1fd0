"""How long a row is proposed nothing after proposals that the model has refused."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

REFUSALS = 4  # refusals in a row after which the wait grows no more


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["refused", "resume"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Patience:
    """A row waits for 0, 2, 6 and then 14 tokens after one, two, three, four refusals in a row.

    So where all proposals are refused, at most one step of fifteen verifies one. A proposal is
    refused if none of its tokens is accepted.

    refused: int32 [batch], proposals refused since one was accepted. resume: int32 [batch], the
    tokens that a row has to have before it is proposed any.
    """

    refused: jax.Array
    resume: jax.Array

    @classmethod
    def create(cls, batch: int) -> Patience:
        """Rows that wait for nothing."""
        return cls(jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.int32))

    def is_over(self, known: jax.Array) -> jax.Array:
        """Whether each row may be proposed tokens, bool [batch]; known: its tokens, int32."""
        return known >= self.resume

    def settled(self, known: jax.Array, proposed: jax.Array, accepted: jax.Array) -> Patience:
        """The next state, of int32 [batch] each.

        known: tokens of each row when the proposal was made. proposed, accepted: numbers of tokens
        of the proposal.
        """
        was_proposed = proposed > 0
        is_refused = was_proposed & (accepted == 0)
        refused = jnp.where(was_proposed, 0, self.refused)
        refused = jnp.where(is_refused, jnp.minimum(self.refused + 1, REFUSALS), refused)
        # The row has one token more after a refusal, the model's own.
        resume = known + 1 + (1 << refused) - 2
        return Patience(refused, jnp.where(is_refused, resume, self.resume))
