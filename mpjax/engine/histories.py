"""The tokens of each slot's row on the device, which proposers read."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from mpjax.language_model import LanguageModel
from mpjax.speculation.proposer import Proposer, Speculation


def create_histories(proposer: Proposer | None, slots: int, tokens: int) -> Speculation | None:
    """A Speculation of slots without rows, of up to so many tokens each; None without a proposer.

    Its `done` is None: programs count on their own.
    """
    if proposer is None:
        return None
    history = jnp.zeros((slots, tokens), jnp.int32)
    return Speculation(history, proposer.create(slots, tokens), None)


def begin_history(
    proposer: Proposer, histories: Speculation, slot: jax.Array, tokens: jax.Array
) -> Speculation:
    """Gives a slot the tokens of its next row, and the state of a proposer that begins.

    slot: int32 scalar. tokens: int32 [tokens], without meaning behind those of the row.
    """
    fresh = proposer.create(1, len(tokens))
    own = jax.tree.map(lambda old, new: old.at[slot].set(new[0]), histories.own, fresh)
    history = histories.history.at[slot].set(tokens)
    return dataclasses.replace(histories, history=history, own=own)


def extend_histories(
    histories: Speculation | None, slots: jax.Array, places: jax.Array, tokens: jax.Array
) -> Speculation | None:
    """Adds a token to the rows of some slots; None stays None.

    slots, places, tokens: int32 [rows], of each token; the number of slots for padding.
    """
    if histories is None:
        return None
    history = histories.history.at[slots, places].set(tokens, mode="drop")
    return dataclasses.replace(histories, history=history)


def require_fit(proposer: Proposer | None, lm: LanguageModel, tokens: int) -> Proposer | None:
    """A proposer that an engine can use for rows of up to so many tokens. Raises ValueError."""
    if proposer is None:
        return None
    name = type(proposer).__name__
    if type(proposer).read is not Proposer.read:
        raise ValueError(
            f"speculate is a {name}, which reads prompts into a cache of its own: an Engine knows "
            "only its model's cache, so give it an mpjax.Ngram, or call mpjax.generate"
        )
    if proposer.k >= lm.page_size:
        raise ValueError(
            f"speculate proposes {proposer.k} tokens: an Engine verifies fewer than a page's, "
            f"{lm.page_size}"
        )
    proposer.require(lm.tokenizer, tokens)
    return proposer
