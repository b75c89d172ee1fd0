"""The speculative decoding program of an engine; see `mpjax.generation.speculation`."""

from __future__ import annotations

import dataclasses

import jax

from mpjax.engine.histories import begin_rows, put_histories
from mpjax.engine.programs import Drawn, Stepping, begin_loop, drawn_of
from mpjax.generation.loop import Loop
from mpjax.generation.speculation.proposer import Proposer
from mpjax.generation.speculation.steps import PLAIN_STEPS, Steps
from mpjax.generation.state import State
from mpjax.kernels import device
from mpjax.models import Decoder


def speculate(
    model: Decoder,
    proposer: Proposer,
    state: State,
    stepping: Stepping,
    *,
    steps: int,
    most: int,
    greedy: bool,
) -> tuple[State, Drawn]:
    """Decodes up to `most` tokens of some rows, in steps that verify proposed tokens.

    Rows advance by different numbers of tokens. The loop ends after `steps` steps of the model (or
    a few more if they are steps without proposals), and before a row could exceed `most` tokens.
    `proposer.k + 1` and `steps` must not exceed `most`.

    steps, most: static. greedy: as for `extend` (static).
    """
    assert state.speculation is not None
    slots, before = stepping.slots, state.speculation
    state, loop = begin_loop(model, state, stepping, most, greedy=greedy)
    own = slots.clip(0, len(state.counts) - 1)
    rows = dataclasses.replace(loop.state, speculation=begin_rows(proposer, before, own))
    stride = min(steps, PLAIN_STEPS) if device.on_gpu() else 1
    largest = max(proposer.k + 1, stride)  # tokens of a row in a turn

    def unfinished(loop: Loop) -> jax.Array:
        return loop.state.running.any()

    def goes_on(loop: Loop) -> jax.Array:
        has_room = (loop.drawn + largest <= most).all()
        return unfinished(loop) & has_room & (loop.state.speculation.done.steps.max() < steps)

    loop = dataclasses.replace(loop, state=rows)
    end = Steps(proposer, model, unfinished).run(loop, goes_on, stride)
    speculation = end.state.speculation
    state = dataclasses.replace(
        state.with_rows(slots, end.state),
        speculation=put_histories(proposer, before, slots, speculation),
    )
    return state, dataclasses.replace(drawn_of(end), speculated=speculation.done)
