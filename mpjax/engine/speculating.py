"""The program of an engine that decodes by speculation; see `mpjax.speculation`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from mpjax.decoding_state import DecodingState
from mpjax.engine.drawing import RowRule
from mpjax.engine.histories import begin_rows, put_rows
from mpjax.engine.programs import Drawn, Stepping, begin, settled
from mpjax.engine.state import EngineState
from mpjax.kernels import device
from mpjax.models import Decoder
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
    slots = stepping.slots
    own = jnp.minimum(slots, len(state.lengths) - 1)
    loop, tables, settings = begin(state, stepping, most, greedy=greedy)
    rule = RowRule(settings, loop.counts - 1, greedy)
    loop = dataclasses.replace(
        loop,
        counts=jnp.ones_like(loop.counts),
        speculation=begin_rows(proposer, state.speculation, own),
    )
    stride = min(steps, PLAIN_STEPS) if device.on_gpu() else 1
    largest = max(proposer.k + 1, stride)  # tokens of a row in a turn

    def unfinished(loop: DecodingState) -> jax.Array:
        return ~loop.finished.all()

    def goes_on(loop: DecodingState) -> jax.Array:
        has_room = (loop.counts + largest <= most + 1).all()
        return unfinished(loop) & has_room & (loop.speculation.done.steps.max() < steps)

    end = Steps(proposer, model, rule, unfinished).run(loop, goes_on, stride)
    histories = put_rows(proposer, state.speculation, slots, end.speculation)
    state, drawn = settled(state, slots, tables, end, end.counts - 1)
    state = dataclasses.replace(state, speculation=histories)
    return state, dataclasses.replace(drawn, speculated=end.speculation.done)
