"""Ngram, a proposer by prompt look-up: no draft model."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.generation.speculation.backoff import Backoff
from mpjax.generation.speculation.proposer import Context, Proposal, Proposer, read_k, whole

LONGEST = 16  # the largest n


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["k", "n"])
@dataclasses.dataclass(frozen=True)
class Ngram(Proposer):
    """Proposes the tokens that followed an earlier occurrence of the row's last n tokens.

    It needs no draft model, and pays off if a text repeats its prompt or itself: code editing,
    summaries, quotations. If the last n tokens did not occur before, steps are plain decoding; a
    row whose proposals are rejected gets fewer (`Backoff`). (Saxena, "Prompt lookup decoding",
    2023; Yang et al., "Inference with reference", 2023.)

    k: the most proposed tokens, 1 to 32. n: the number of matching tokens, 1 to 16: a smaller n
    proposes more often, with a lower acceptance.

    Raises ValueError for other numbers.
    """

    k: int = 4
    n: int = 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", read_k("Ngram", self.k))
        object.__setattr__(self, "n", whole("Ngram: n", self.n, 1, LONGEST))

    def create(self, batch: int, tokens: int) -> Backoff:
        """The initial back-off of each row."""
        return Backoff.create(batch)

    def propose(self, context: Context) -> tuple[Proposal, Any]:
        """The tokens after the most recent match of each row; see `continuation`."""
        backoff: Backoff = context.state.speculation.own
        tokens, is_found = continuation(context.history, context.known, self.n, self.k)
        counts = jnp.where(is_found & backoff.is_over(context.known), context.most, 0)
        return Proposal(tokens, counts), backoff

    def settle(
        self, own: Backoff, known: jax.Array, proposed: jax.Array, accepted: jax.Array
    ) -> Backoff:
        """The back-off after a step: rows with a rejected proposal wait."""
        return own.settled(known, proposed, accepted)


def continuation(
    history: jax.Array, known: jax.Array, n: int, k: int
) -> tuple[jax.Array, jax.Array]:
    """The k tokens after the most recent earlier occurrence of each row's last n tokens.

    history: int32 [batch, tokens], of which the first known[b] (int32 [batch]) belong to row b.

    A copy that reaches the end of the history continues with its own copied tokens, as in LZ77, so
    a row that repeats five tokens is continued with them. The occurrence may overlap the last n
    tokens.

    Returns tokens int32 [batch, k], and whether there is an occurrence, bool [batch].
    """
    batch, size = history.shape
    if size <= n:
        return jnp.zeros((batch, k), jnp.int32), jnp.zeros(batch, bool)
    last = jnp.maximum(known[:, None] - n + jnp.arange(n)[None], 0)
    suffix = jnp.take_along_axis(history, last, axis=1)  # [batch, n]
    place = jnp.arange(size - n)[None]
    is_match = place + n < known[:, None]
    for j in range(n):
        is_match &= history[:, j : size - n + j] == suffix[:, j, None]
    found = jnp.where(is_match, place, -1).max(axis=1)  # [batch]
    begin = found + n
    period = jnp.maximum(known - begin, 1)
    places = begin[:, None] + jnp.arange(k)[None] % period[:, None]
    return jnp.take_along_axis(history, places, axis=1), found >= 0
