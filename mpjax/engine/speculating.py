"""The program of an engine that decodes by speculation; see `mpjax.speculation`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from mpjax.decoding_state import DecodingState
from mpjax.engine.drawing import RowRule, no_candidates
from mpjax.engine.histories import begin_rows, put_rows
from mpjax.engine.programs import Drawn, Stepping, settled, view
from mpjax.engine.state import EngineState
from mpjax.kernels import device
from mpjax.models import Decoder
from mpjax.random_keys import row_keys
from mpjax.speculation.loop import PLAIN_STEPS, Steps
from mpjax.speculation.proposer import Proposer


def speculate(
    model: Decoder,
    proposer: Proposer,
    state: EngineState,
    stepping: Stepping,
    *,
    steps: int,
    most: int,
    greedy: bool,
) -> tuple[EngineState, Drawn]:
    """Draws up to `most` tokens of some rows, in steps that verify what is proposed.

    Rows advance by different numbers. The loop ends after `steps` steps of the model, or a few more
    if they are plain ones, and before a row could have more than `most` tokens. `proposer.k + 1`
    and `steps` are no more than `most`.

    steps, most: static. greedy: as for `extend` (static).
    """
    assert state.speculation is not None
    slots, rows = stepping.slots, len(stepping.slots)
    own = jnp.minimum(slots, len(state.lengths) - 1)
    tables = state.tables.at[slots, stepping.entries].set(stepping.pages, mode="drop")
    settings = jax.tree.map(lambda x: x[own], state.settings)
    tokens = jnp.zeros((rows, most + 1), jnp.int32)
    begin = DecodingState(
        cache=view(state, tables[own], state.lengths[own], own),
        keys=row_keys(settings.key_words),
        tokens=tokens.at[:, 0].set(state.newest[own]),
        logprobs=jnp.zeros((rows, most + 1), jnp.float32),
        counts=jnp.ones(rows, jnp.int32),
        finished=~state.running[own] | (slots >= len(state.lengths)),
        seen=None if greedy else state.seen[own],
        step=jnp.int32(1),
        speculation=begin_rows(proposer, state.speculation, own),
        candidates=None if greedy else no_candidates((rows, most + 1), state.seen.shape[1]),
    )
    stride = min(steps, PLAIN_STEPS) if device.on_gpu() else 1
    largest = max(proposer.k + 1, stride)  # tokens of a row in a turn

    def unfinished(loop: DecodingState) -> jax.Array:
        return ~loop.finished.all()

    def goes_on(loop: DecodingState) -> jax.Array:
        has_room = (loop.counts + largest <= most + 1).all()
        return unfinished(loop) & has_room & (loop.speculation.done.steps.max() < steps)

    rule = RowRule(settings, state.counts[own] - 1, greedy)
    end = Steps(proposer, model, rule, unfinished).run(begin, goes_on, stride)
    histories = put_rows(proposer, state.speculation, slots, end.speculation)
    state, drawn = settled(state, slots, tables, end, end.counts - 1)
    state = dataclasses.replace(state, speculation=histories)
    return state, dataclasses.replace(drawn, speculated=end.speculation.done)
