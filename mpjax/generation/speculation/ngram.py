"""Prompt look-up: the tokens that followed the row's last n tokens when they came before."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.generation.speculation.backoff import Backoff
from mpjax.generation.speculation.proposer import Context, Proposal, Proposer, read_k, whole

LONGEST = 16  # tokens that a proposer compares


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["k", "n"])
@dataclasses.dataclass(frozen=True)
class Ngram(Proposer):
    """Proposes what followed the last n tokens of a row when it had them before (prompt look-up).

    It needs no second model, and pays where a text repeats its prompt or itself: when code is
    edited, a text is summed up or quoted. Where the last n tokens are new, steps are those of plain
    decoding, and a row whose proposals are rejected gets fewer (`Backoff`). (Saxena,
    "Prompt lookup decoding", 2023; Yang et al., "Inference with reference", 2023.)

    k: the most tokens that are proposed at a time, 1 to 32. n: the tokens that are compared, 1 to
    16: with fewer, more is proposed and less of it accepted.

    Raises ValueError for other numbers.
    """

    k: int = 4
    n: int = 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", read_k("Ngram", self.k))
        object.__setattr__(self, "n", whole("Ngram: n", self.n, 1, LONGEST))

    def create(self, batch: int, tokens: int) -> Backoff:
        """The back-off of each row."""
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
        """Rows whose whole proposal was rejected back off."""
        return own.settled(known, proposed, accepted)


def continuation(
    history: jax.Array, known: jax.Array, n: int, k: int
) -> tuple[jax.Array, jax.Array]:
    """The k tokens after the most recent place where a row had its last n tokens before.

    history: int32 [batch, tokens], of which known[b], int32 [batch], are tokens of row b.

    A copy that reaches the end of the history goes on with what it has copied itself, as in LZ77: a
    row that says the same five tokens again and again is continued with them.

    Returns int32 [batch, k], and whether there is such a place, bool [batch]. The last n tokens may
    overlap with it.
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
