"""Histories: the tokens of each slot's row on the device, for proposers."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from mpjax.generation.speculation.proposer import Proposer, Speculated, Speculation
from mpjax.language_model import LanguageModel


def create_histories(proposer: Proposer | None, slots: int, tokens: int) -> Speculation | None:
    """A Speculation of empty slots with room for `tokens` tokens each; None without a proposer.

    `done` is None: each program has its own counts.
    """
    if proposer is None:
        return None
    history = jnp.zeros((slots, tokens), jnp.int32)
    return Speculation(history, proposer.create(slots, tokens), None)


def begin_history(
    proposer: Proposer,
    histories: Speculation,
    slot: jax.Array,
    tokens: jax.Array,
    count: jax.Array,
) -> Speculation:
    """Writes a new row's tokens into its slot's history, and passes them to the proposer.

    slot, count: int32 scalars; a slot out of range changes nothing. tokens: int32 [tokens], of
    which the first `count` are the row's.
    """
    own = proposer.begin(histories.own, slot, tokens, count)
    history = histories.history.at[slot].set(tokens, mode="drop")
    return dataclasses.replace(histories, history=history, own=own)


def begin_rows(proposer: Proposer, histories: Speculation, slots: jax.Array) -> Speculation:
    """The Speculation of the rows in `slots`, int32 [rows], with counts of 0."""
    # Separate arrays, so that the fields don't share a buffer.
    done = Speculated(*(jnp.zeros(len(slots), jnp.int32) for _ in range(3)))
    return Speculation(histories.history[slots], proposer.rows(histories.own, slots), done)


def put_histories(
    proposer: Proposer, histories: Speculation, slots: jax.Array, rows: Speculation
) -> Speculation:
    """Writes the rows' Speculation back to `slots`; padding rows have a slot out of range."""
    history = histories.history.at[slots].set(rows.history, mode="drop")
    return Speculation(history, proposer.put_rows(histories.own, slots, rows.own), None)


def state_bytes(proposer: Proposer | None, slots: int, tokens: int) -> int:
    """The bytes of a Speculation of `slots` slots with room for `tokens` tokens each."""
    shapes = jax.eval_shape(lambda: create_histories(proposer, slots, tokens))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def extend_histories(
    histories: Speculation | None, slots: jax.Array, places: jax.Array, tokens: jax.Array
) -> Speculation | None:
    """Writes one token to the history of each of `slots`; None stays None.

    slots, places, tokens: int32 [rows]: the slot, position and id of each token. The slot of
    padding is out of range.
    """
    if histories is None:
        return None
    history = histories.history.at[slots, places].set(tokens, mode="drop")
    return dataclasses.replace(histories, history=history)


def require_fit(proposer: Proposer | None, lm: LanguageModel, tokens: int) -> Proposer | None:
    """Returns the proposer, or raises ValueError if an engine can't use it for `tokens` tokens."""
    if proposer is None:
        return None
    name, kind = type(proposer).__name__, type(proposer)
    if kind.read is not Proposer.read and kind.begin is Proposer.begin:
        raise ValueError(
            f"speculate is a {name}, which reads prompts, but not those of an Engine's rows: give "
            "it a method `begin` beside `read`, or call mpjax.generate_tokens"
        )
    if proposer.k >= lm.page_size:
        raise ValueError(
            f"speculate proposes {proposer.k} tokens: an Engine verifies fewer than a page's, "
            f"{lm.page_size}"
        )
    proposer.require(lm.tokenizer, tokens)
    proposer.require_model(lm.config)
    return proposer
