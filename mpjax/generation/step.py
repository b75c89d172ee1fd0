"""The step that all generation repeats: run the model, draw, keep what is drawn, and end rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mpjax.generation.speculation.proposer import Proposal
from mpjax.generation.speculation.verification import verify
from mpjax.generation.state import State
from mpjax.models import Decoder
from mpjax.models.state import DecoderCache
from mpjax.sampling.draw import Draw, draw, is_end
from mpjax.sampling.processors import advance, process


class Read(NamedTuple):
    """What reading tokens gives.

    logits: [rows, vocabulary], after each row's last token; or where a proposal is verified
        [rows, positions, vocabulary]. cache: with the tokens. scores: of what was read, if any.
    """

    logits: jax.Array
    cache: DecoderCache
    scores: Any = None


class StepTokens(NamedTuple):
    """What a step has drawn.

    draw: arrays [rows, positions, …], in the order of positions; one position without a proposal.
    counts: int32 [rows], how many of them a row gets. accepted: int32 [rows], tokens of a row's
        proposal that the model has drawn too. scores: as in Read.
    """

    draw: Draw
    counts: jax.Array
    accepted: jax.Array
    scores: Any = None


def step(
    model: Decoder,
    state: State,
    read: Callable[[DecoderCache], Read],
    goes_on: jax.Array,
    proposal: Proposal | None = None,
) -> tuple[State, StepTokens]:
    """Reads tokens into the cache, and draws those behind them.

    read: adds tokens to the cache and returns the logits behind them, such as `newest`.
    goes_on: bool [rows], the rows whose next token is drawn. Nothing is recorded for others.
    proposal: tokens that `read` has added behind each row's newest one; the row gets those of them
        that the model draws too, and one more.
    """
    logits, cache, scores = read(state.cache)
    divided = model.shards > 1
    if proposal is None:
        wanted = process(state.processors, logits, state.counts) if state.processors else None
        found = draw(
            logits, state.settings, state.counts, wanted, state.processors, divided=divided
        )
        found = jax.tree.map(lambda x: x[:, None], found)
        accepted = jnp.zeros_like(state.counts)
    else:
        found, accepted = verify(logits, proposal, state, divided=divided)
    counts = jnp.where(goes_on, accepted + 1, 0)
    ends = _ends(found, state)
    if proposal is not None:
        counts = jnp.minimum(counts, jnp.where(ends.any(1), jnp.argmax(ends, 1) + 1, counts))
        cache = model.settle(cache, state.cache, counts)
    is_new = jnp.arange(found.tokens.shape[1])[None] < counts[:, None]
    last = jnp.maximum(counts - 1, 0)[:, None]
    newest = jnp.take_along_axis(found.tokens, last, 1)[:, 0]
    state = dataclasses.replace(
        state,
        cache=cache,
        newest=jnp.where(goes_on, newest, state.newest),
        counts=state.counts + counts,
        running=state.running & ~(is_new & ends).any(1),
        processors=advance(state.processors, found.tokens, is_new),
    )
    return state, StepTokens(found, counts, accepted, scores)


def _ends(found: Draw, state: State) -> jax.Array:
    """Whether a row would end with the token at each position, bool [rows, positions]."""
    counts = state.counts[:, None] + 1 + jnp.arange(found.tokens.shape[1])[None]
    of_position = Draw(found.tokens, found.logprobs)
    ends = jax.vmap(is_end, in_axes=(1, None, 1), out_axes=1)
    found_ends: jax.Array = ends(of_position, state.settings, counts)
    return found_ends


def given(logits: jax.Array, counts: jax.Array) -> Callable[[DecoderCache], Read]:
    """The reading of tokens that the cache has already, though not in its lengths.

    logits: behind them. counts: [rows], the number of tokens of each row.
    """

    def read(cache: DecoderCache) -> Read:
        lengths = cache.lengths + counts.astype(jnp.int32)
        return Read(logits, dataclasses.replace(cache, lengths=lengths))

    return read


def newest(
    model: Decoder, state: State, goes_on: jax.Array, proposal: Proposal | None = None
) -> Callable[[DecoderCache], Read]:
    """Reads each row's newest token, and a proposal's behind it, where `goes_on` (bool [rows])."""

    def read(cache: DecoderCache) -> Read:
        if proposal is None:
            tokens, counts = state.newest[:, None], goes_on.astype(jnp.int32)
            return Read(*model.step(tokens, counts, cache))
        tokens = jnp.concatenate([state.newest[:, None], proposal.tokens], axis=1)
        counts = jnp.where(goes_on, proposal.counts + 1, 0)
        return Read(*model.step(tokens, counts, cache, every_position=True, tentative=True))

    return read
