"""A decoding step in two programs: `forward` computes logits, `choose` samples from them.

The host computes the constraints' token masks while `forward` runs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.engine.controlled import masks_alone, with_masks
from mpjax.engine.histories import begin_rows, put_histories
from mpjax.engine.programs import Drawn, Stepping, begin_loop, drawn_of
from mpjax.generation.loop import Loop
from mpjax.generation.speculation.proposer import Proposal, Proposer
from mpjax.generation.speculation.steps import Proposed, Steps
from mpjax.generation.state import State
from mpjax.generation.step import given, newest, step
from mpjax.models import Decoder
from mpjax.models.recurrent import join, part
from mpjax.models.watch import Captured

# (logits, proposal, inputs of the Tentative states, captures). The inputs aren't kept in the State,
# which programs donate to each other.
Forwarded = tuple[jax.Array, Proposal | None, Any, Captured | None]


def forward(
    model: Decoder,
    proposer: Proposer | None,
    state: State,
    stepping: Stepping,
    *,
    most: int,
) -> tuple[State, Forwarded]:
    """Computes the logits after each row's newest token and after its proposed tokens.

    most: as for `speculate` (static). Returns the logits that `choose` draws from, float32 [rows,
    vocabulary] or, with a proposer, [rows, positions, vocabulary], the proposal, the inputs with
    which `choose` rolls recurrent states back, and the captures, as in Drawn.
    """
    old, proposal = state, None
    state, loop = _begin(model, proposer, state, stepping, most)
    alive = loop.state.running
    if proposer is not None:
        # The masks in the state are those of the previous step: allow all tokens here.
        anything = jnp.full((1, 1, 1), ~np.uint32(0))
        free = with_masks(loop.state.processors, anything)
        loop = dataclasses.replace(loop, state=dataclasses.replace(loop.state, processors=free))
        loop, proposal, _ = _steps(model, proposer).propose(loop, alive)
    rows = loop.state
    found = newest(model, rows, alive, proposal)(rows.cache)
    # Keep the lengths from before the step: `choose` advances them, once it knows how many
    # proposed tokens are accepted.
    layers, rest = part(found.cache.layers)
    cache = dataclasses.replace(found.cache, layers=layers, lengths=rows.cache.lengths)
    rows = dataclasses.replace(rows, cache=cache)
    forwarded = found.logits, proposal, rest, found.cache.captured
    return _end(proposer, old, state, stepping, rows), forwarded


def choose(
    model: Decoder,
    proposer: Proposer | None,
    state: State,
    stepping: Stepping,
    forwarded: Forwarded,
    masks: jax.Array,
    *,
    most: int,
) -> tuple[State, Drawn]:
    """Samples the next tokens from the logits of `forward`.

    Without a proposer it takes neither the model's arrays nor the layers of the cache.

    masks: uint32 [rows, positions, words], bit masks of the tokens that a constraint allows at each
    position; all bits set for rows without a constraint. See `Matcher.masks`.
    state: without processors if all rows take the likeliest token that their mask allows.
    """
    likeliest = not state.processors
    old, (logits, proposal, rest, _) = state, forwarded
    state, loop = _begin(model, proposer, state, stepping, most, likeliest=likeliest)
    own = masks_alone(masks) if likeliest else with_masks(loop.state.processors, masks)
    rows = dataclasses.replace(loop.state, processors=own)
    if proposer is not None:
        cache = dataclasses.replace(rows.cache, layers=join(rows.cache.layers, rest))
        rows = dataclasses.replace(rows, cache=cache)
    loop = dataclasses.replace(loop, state=rows)
    if proposer is None:
        read = given(logits, rows.running)
        end = loop.record(*step(model, rows, read, rows.running))
        speculated = None
    else:
        assert proposal is not None
        end = _steps(model, proposer).verify(Proposed(loop, proposal, rows.running), logits)
        speculated = end.state.speculation.done
    drawn = dataclasses.replace(drawn_of(end), speculated=speculated)
    last = dataclasses.replace(end.state, processors=()) if likeliest else end.state
    return _end(proposer, old, state, stepping, last), drawn


def _steps(model: Decoder, proposer: Proposer) -> Steps:
    return Steps(proposer, model, lambda loop: loop.state.running.any())


def _begin(
    model: Decoder,
    proposer: Proposer | None,
    state: State,
    stepping: Stepping,
    most: int,
    *,
    likeliest: bool = False,
) -> tuple[State, Loop]:
    """The initial Loop of `programs.begin_loop`, with the rows' Speculation."""
    histories = state.speculation
    state, loop = begin_loop(model, state, stepping, most, greedy=False)
    if likeliest:
        rows = dataclasses.replace(loop.state, settings=loop.state.settings.without_draws)
        loop = dataclasses.replace(loop, state=rows, top_logprobs=None)
    if proposer is None:
        return state, loop
    own = stepping.slots.clip(0, len(state.counts) - 1)
    rows = dataclasses.replace(loop.state, speculation=begin_rows(proposer, histories, own))
    return state, dataclasses.replace(loop, state=rows)


def _end(
    proposer: Proposer | None, before: State, state: State, stepping: Stepping, rows: State
) -> State:
    """The engine's state with a program's rows written back. before: the state before it."""
    after = state.with_rows(stepping.slots, rows)
    if proposer is None:
        return after
    histories = put_histories(proposer, before.speculation, stepping.slots, rows.speculation)
    return dataclasses.replace(after, speculation=histories)
