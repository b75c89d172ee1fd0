"""The step that all generation repeats: run the model, draw, record tokens, end rows."""

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
from mpjax.models.deterministic import in_own_mode
from mpjax.models.state import DecoderCache
from mpjax.sampling.draw import Draw, draw, is_end
from mpjax.sampling.processors import advance, process


class Read(NamedTuple):
    """The result of running the model on tokens.

    logits: [rows, vocabulary], after each row's last token; with a proposal [rows, positions,
        vocabulary]. cache: with the tokens added. scores: of a scored prompt's tokens, or None.
    """

    logits: jax.Array
    cache: DecoderCache
    scores: Any = None


class StepTokens(NamedTuple):
    """The tokens that a step has drawn.

    draw: arrays [rows, positions, …]; one position without a proposal.
    counts: int32 [rows], how many of them a row gets. accepted: int32 [rows], the number of a row's
        accepted proposed tokens. scores: as in Read.
    """

    draw: Draw
    counts: jax.Array
    accepted: jax.Array
    scores: Any = None


@in_own_mode
def step(
    model: Decoder,
    state: State,
    read: Callable[[DecoderCache], Read],
    goes_on: jax.Array,
    proposal: Proposal | None = None,
) -> tuple[State, StepTokens]:
    """Adds tokens to the cache, and draws the next ones.

    read: adds tokens to the cache and returns the logits after them, such as `newest`.
    goes_on: bool [rows], the rows whose next token is drawn; other rows don't change.
    proposal: tokens that `read` adds after each row's newest one; a row gets the accepted ones and
        one more.
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
    """Whether the token at each position would end its row, bool [rows, positions]."""
    counts = state.counts[:, None] + 1 + jnp.arange(found.tokens.shape[1])[None]
    of_position = Draw(found.tokens, found.logprobs)
    ends = jax.vmap(is_end, in_axes=(1, None, 1), out_axes=1)
    found_ends: jax.Array = ends(of_position, state.settings, counts)
    return found_ends


def given(logits: jax.Array, counts: jax.Array) -> Callable[[DecoderCache], Read]:
    """The argument `read` of `step` for tokens in the cache that its lengths don't count yet.

    logits: after these tokens. counts: [rows], their number in each row.
    """

    def read(cache: DecoderCache) -> Read:
        lengths = cache.lengths + counts.astype(jnp.int32)
        return Read(logits, dataclasses.replace(cache, lengths=lengths))

    return read


def newest(
    model: Decoder, state: State, goes_on: jax.Array, proposal: Proposal | None = None
) -> Callable[[DecoderCache], Read]:
    """The argument `read` of `step` for the newest token and proposal of rows in `goes_on`."""

    def read(cache: DecoderCache) -> Read:
        if proposal is None:
            tokens, counts = state.newest[:, None], goes_on.astype(jnp.int32)
            return Read(*model.step(tokens, counts, cache))
        tokens = jnp.concatenate([state.newest[:, None], proposal.tokens], axis=1)
        counts = jnp.where(goes_on, proposal.counts + 1, 0)
        return Read(*model.step(tokens, counts, cache, every_position=True, tentative=True))

    return read
