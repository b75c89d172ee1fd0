"""Proposer, the interface of proposers; the arrays that they take and return."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.generation.state import State
from mpjax.kernels.checks import shown
from mpjax.models import Decoder, DecoderConfig
from mpjax.sampling.settings import RowSettings
from mpjax.text.tokenizer import Tokenizer

MOST = 32  # proposed tokens of a step; more would make products slower than those of one token


def _arrays(*names: str) -> Any:
    return functools.partial(
        jax.tree_util.register_dataclass, data_fields=list(names), meta_fields=[]
    )


@_arrays("tokens", "counts", "probabilities")
@dataclasses.dataclass(frozen=True)
class Proposal:
    """The proposed tokens of each row.

    tokens: int32 [batch, k]. counts: int32 [batch], the number of proposed ones; others are
        padding.
    probabilities: float32 [batch, k, vocabulary], the distributions from which the tokens were
        drawn; None for a deterministic proposer.
    """

    tokens: jax.Array
    counts: jax.Array
    probabilities: jax.Array | None = None


@_arrays("proposed", "accepted", "steps")
@dataclasses.dataclass(frozen=True)
class Speculated:
    """Counts of speculative decoding, int32 [batch] each.

    proposed, accepted: numbers of tokens. steps: steps of the model in which the row got at least
    one token, without prefill, which draws a row's first token.
    """

    proposed: jax.Array
    accepted: jax.Array
    steps: jax.Array


@_arrays("history", "own", "done")
@dataclasses.dataclass(frozen=True)
class Speculation:
    """The part of a State for speculative decoding.

    history: int32 [batch, tokens], each row's prompt and new tokens, then undefined values. own:
    the proposer's state. done: a Speculated, the counts; None between the programs of an engine.
    """

    history: jax.Array
    own: Any
    done: Any


@dataclasses.dataclass(frozen=True)
class Context:
    """The arguments of `Proposer.propose`.

    state: of the rows. alive: bool [batch], whether a row gets tokens in this step.
    most: int32 [batch], the most tokens to propose to a row; 0 for rows that are not alive.
    model: the model that verifies the tokens.
    """

    state: State
    alive: jax.Array
    most: jax.Array
    model: Decoder

    @property
    def vocabulary(self) -> int:
        """The number of columns of the model's logits."""
        return self.model.columns

    @property
    def settings(self) -> RowSettings:
        """The sampling settings of the rows."""
        return self.state.settings

    @property
    def history(self) -> jax.Array:
        """Prompts and new tokens, int32 [batch, tokens]; see Speculation."""
        history: jax.Array = self.state.speculation.history
        return history

    @property
    def known(self) -> jax.Array:
        """The length of each row's history, int32 [batch], including its newest token."""
        return self.state.cache.lengths + 1


class Proposer:
    """Proposes up to k tokens for each row. A pytree whose methods are pure functions.

    k: the most tokens of a proposal (static).
    always: whether every row with `most` > 0 gets a proposal (static). Otherwise plain decoding
        steps run while no row has a proposal.
    block: tokens of a block of the proposer's own cache, or None (static): a proposal doesn't cross
        a block boundary; see `steps.most_proposed`.
    """

    k: int
    always: bool = False
    block: int | None = None

    def require(self, tokenizer: Tokenizer | None, tokens: int) -> None:
        """Raises ValueError unless the proposer supports rows of up to `tokens` tokens.

        tokenizer: of the rows; None if it is not known.
        """

    def require_model(self, config: DecoderConfig) -> None:
        """Raises ValueError unless the proposer supports a model of this configuration."""

    def create(self, batch: int, tokens: int) -> Any:
        """The proposer's initial state. tokens: the most tokens of a row."""
        return None

    def read(self, own: Any, tokens: jax.Array, lengths: jax.Array) -> Any:
        """The state after the prompts, int32 [batch, tokens], padded. lengths: int32 [batch]."""
        return own

    def begin(self, own: Any, slot: jax.Array, tokens: jax.Array, count: jax.Array) -> Any:
        """The state of an engine's slots after a new row has begun in one of them.

        slot, count: int32 scalars. tokens: int32 [tokens], of which the first `count` are the
        row's. A slot out of range with a count of 0 changes nothing.
        """
        return self.put_rows(own, slot[None], self.create(1, len(tokens)))

    def rows(self, own: Any, slots: jax.Array) -> Any:
        """The state of the rows in `slots`, int32 [rows], from arrays [slots, …]."""
        return jax.tree.map(lambda each: each[slots], own)

    def put_rows(self, own: Any, slots: jax.Array, rows: Any) -> Any:
        """The state after writing the rows' into `slots`; padding rows have a slot out of range."""
        return jax.tree.map(lambda old, new: old.at[slots].set(new, mode="drop"), own, rows)

    def propose(self, context: Context) -> tuple[Proposal, Any]:
        """Proposes tokens after each row's newest; returns them and the proposer's new state."""
        raise NotImplementedError

    def propose_to(self, context: Context) -> tuple[Proposal, State]:
        """Proposes tokens as `propose`; returns them and the rows' state with the new one.

        A proposer that uses the model's own cache overrides this method.
        """
        proposal, own = self.propose(context)
        speculation = dataclasses.replace(context.state.speculation, own=own)
        return proposal, dataclasses.replace(context.state, speculation=speculation)

    def settle(self, own: Any, known: jax.Array, proposed: jax.Array, accepted: jax.Array) -> Any:
        """The state after the model has verified the last proposal.

        known: int32 [batch], length of the history when the proposal was made. proposed, accepted:
        int32 [batch], numbers of proposed and of accepted tokens.
        """
        return own


def read_k(name: str, k: Any) -> int:
    """The checked number of proposed tokens, as a Python integer. Raises ValueError."""
    return whole(f"{name}: k", k, 1, MOST)


def whole(name: str, value: Any, least: int, most: int) -> int:
    """The value as an integer; raises ValueError unless it is a whole number in [least, most]."""
    try:
        found = operator.index(value)
    except TypeError:
        found = None
    if found is None or isinstance(value, bool) or not least <= found <= most:
        raise ValueError(
            f"{name} is {shown(value)}: expected a whole number from {least} to {most}"
        )
    return found


def put(target: jax.Array, values: jax.Array, starts: jax.Array, counts: jax.Array) -> jax.Array:
    """Writes the first counts[b] values of each row b to target[b] from column starts[b] on.

    target: [batch, columns, …]. values: [batch, most values, …]. starts, counts: int32 [batch].
    """
    if values.shape[1] == 1:  # XLA fuses this, also for several targets, but not a scatter
        is_place = jnp.arange(target.shape[1])[None] == starts[:, None]
        is_place &= (counts > 0)[:, None]
        return jnp.where(jax.lax.expand_dims(is_place, range(2, target.ndim)), values, target)
    column = jnp.arange(values.shape[1])[None]
    places = jnp.where(column < counts[:, None], starts[:, None] + column, target.shape[1])
    return target.at[jnp.arange(len(target))[:, None], places].set(values, mode="drop")
