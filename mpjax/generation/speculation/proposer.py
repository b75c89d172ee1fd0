"""The interface of proposers: the state that they read, and the tokens that they propose."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.generation.state import State
from mpjax.kernels.checks import require_type, shown
from mpjax.sampling.settings import RowSettings
from mpjax.text.tokenizer import Tokenizer

MOST = 32  # proposed tokens of a step; more would leave the rows that a product has for free


def _arrays(*names: str) -> Any:
    return functools.partial(
        jax.tree_util.register_dataclass, data_fields=list(names), meta_fields=[]
    )


@_arrays("tokens", "counts", "probabilities")
@dataclasses.dataclass(frozen=True)
class Proposal:
    """Tokens that may come next.

    tokens: int32 [batch, k]. counts: int32 [batch], how many of a row's tokens are proposed.
    probabilities: float32 [batch, k, vocabulary], the distributions from which the tokens were
        drawn; None for a proposer that draws nothing at random.
    """

    tokens: jax.Array
    counts: jax.Array
    probabilities: jax.Array | None = None


@_arrays("proposed", "accepted", "steps")
@dataclasses.dataclass(frozen=True)
class Speculated:
    """What speculation has done, int32 [batch] each.

    proposed, accepted: numbers of tokens. steps: of the model, in which the row got a token or
    more; the first token of a row, which comes from its prompt, is in none of them.
    """

    proposed: jax.Array
    accepted: jax.Array
    steps: jax.Array


@_arrays("history", "own", "done")
@dataclasses.dataclass(frozen=True)
class Speculation:
    """The part of a State that speculation adds.

    history: int32 [batch, tokens], each row's prompt and new tokens; undefined after them.
    own: the state of the proposer. done: counts of tokens and steps, a Speculated; None between the
    programs of an engine.
    """

    history: jax.Array
    own: Any
    done: Any


@dataclasses.dataclass(frozen=True)
class Context:
    """What a proposer may know when it proposes.

    state: of the rows. alive: bool [batch], whether a row goes on.
    most: int32 [batch], the most tokens that a row may be proposed, 0 for rows that don't go on.
    vocabulary: the number of columns of the model's logits.
    """

    state: State
    alive: jax.Array
    most: jax.Array
    vocabulary: int

    @property
    def settings(self) -> RowSettings:
        """How the model's tokens are drawn."""
        return self.state.settings

    @property
    def history(self) -> jax.Array:
        """Prompts and new tokens, int32 [batch, tokens]; see Speculation."""
        history: jax.Array = self.state.speculation.history
        return history

    @property
    def known(self) -> jax.Array:
        """The number of tokens of each row's history, int32 [batch]: its newest is the last."""
        return self.state.cache.lengths + 1


class Proposer:
    """Proposes up to k tokens for each row. A pytree, whose methods are pure functions.

    k: the most tokens of a proposal (static).
    always: whether each row with room for a token gets one (static). Otherwise steps of plain
        decoding, one or a few, follow where no row gets any.
    block: tokens of a block of the proposer's own cache, if its format has blocks (static): a
        proposal does not reach the next block; see `steps.most_proposed`.
    """

    k: int
    always: bool = False
    block: int | None = None

    def require(self, tokenizer: Tokenizer | None, tokens: int) -> None:
        """Raises ValueError unless rows of up to `tokens` tokens can be continued.

        tokenizer: of the rows; None where it is not known.
        """

    def create(self, batch: int, tokens: int) -> Any:
        """The proposer's state before the prompts; tokens: the most tokens of a row."""
        return None

    def read(self, own: Any, tokens: jax.Array, lengths: jax.Array) -> Any:
        """The state after the prompts, int32 [batch, tokens], padded, of int32 [batch] lengths."""
        return own

    def begin(self, own: Any, slot: jax.Array, tokens: jax.Array, count: jax.Array) -> Any:
        """The state of an engine's slots after another row has begun in one of them.

        slot, count: int32 scalars. tokens: int32 [tokens], of which `count` are the row's. With a
        slot too high, and a count of 0, the state stays.
        """
        return self.put_rows(own, slot[None], self.create(1, len(tokens)))

    def rows(self, own: Any, slots: jax.Array) -> Any:
        """The state of the rows in some slots, int32 [rows], of a state of arrays [slots, …]."""
        return jax.tree.map(lambda each: each[slots], own)

    def put_rows(self, own: Any, slots: jax.Array, rows: Any) -> Any:
        """The state with that of the rows in some slots; rows of padding have a slot too high."""
        return jax.tree.map(lambda old, new: old.at[slots].set(new, mode="drop"), own, rows)

    def propose(self, context: Context) -> tuple[Proposal, Any]:
        """Proposes tokens after each row's newest; returns them and the proposer's next state."""
        raise NotImplementedError

    def settle(self, own: Any, known: jax.Array, proposed: jax.Array, accepted: jax.Array) -> Any:
        """The state after the model has accepted some of the last proposal.

        known: int32 [batch], tokens of the history when the proposal was made.
        proposed, accepted: int32 [batch], numbers of tokens of the proposal.
        """
        return own


def read_k(name: str, k: Any) -> int:
    """The number of proposed tokens as a Python integer. Raises ValueError."""
    return whole(f"{name}: k", k, 1, MOST)


def whole(name: str, value: Any, least: int, most: int) -> int:
    """A whole number from `least` to `most`. Raises ValueError."""
    try:
        found = operator.index(value)
    except TypeError:
        found = None
    if found is None or isinstance(value, bool) or not least <= found <= most:
        raise ValueError(
            f"{name} is {shown(value)}: expected a whole number from {least} to {most}"
        )
    return found


def read_speculate(speculate: Any) -> Proposer | None:
    """The argument `speculate` of functions that generate. Raises ValueError."""
    if speculate is not None:
        hint = ", such as mpjax.Ngram() or mpjax.Draft(lm)"
        require_type("speculate", speculate, Proposer, hint=hint)
    return speculate


def put(target: jax.Array, values: jax.Array, starts: jax.Array, counts: jax.Array) -> jax.Array:
    """Writes the first counts[b] values of each row b to target[b] from column starts[b] on.

    target: [batch, columns, …]. values: [batch, most values, …]. starts, counts: int32 [batch].
    """
    if values.shape[1] == 1:  # XLA fuses this, also for several targets, but no scatter
        is_place = jnp.arange(target.shape[1])[None] == starts[:, None]
        is_place &= (counts > 0)[:, None]
        return jnp.where(jax.lax.expand_dims(is_place, range(2, target.ndim)), values, target)
    column = jnp.arange(values.shape[1])[None]
    places = jnp.where(column < counts[:, None], starts[:, None] + column, target.shape[1])
    return target.at[jnp.arange(len(target))[:, None], places].set(values, mode="drop")
