"""The steps of speculative decoding: propose, verify in one step, keep the accepted tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mpjax.generation.loop import Loop, repeat, several
from mpjax.generation.speculation.proposer import (
    Context,
    Proposal,
    Proposer,
    Speculated,
    Speculation,
    put,
)
from mpjax.generation.state import State
from mpjax.generation.step import given, newest, step
from mpjax.kernels import device
from mpjax.models import Decoder

PLAIN_STEPS = 4  # plain decoding steps on a GPU before proposing again, if no row has a proposal


def create_speculation(
    proposer: Proposer, own: object, tokens: jax.Array, lengths: jax.Array, new: jax.Array
) -> Speculation:
    """The Speculation of rows after prefill, with the proposer's state after the prompts.

    own: the proposer's initial state. tokens: int [batch, tokens], the prompts, padded on the
    right. lengths: int32 [batch]. new: int32 [batch, columns], of which the first column is drawn.
    """
    batch, room = new.shape
    history = jnp.pad(tokens.astype(jnp.int32), ((0, 0), (0, room)))
    history = put(history, new[:, :1], lengths, jnp.ones(batch, jnp.int32))
    # Three separate arrays: a buffer that appears twice can't be donated.
    done = Speculated(*(jnp.zeros(batch, jnp.int32) for _ in range(3)))
    return Speculation(history, proposer.read(own, tokens, lengths), done)


def decode(
    proposer: Proposer,
    model: Decoder,
    loop: Loop,
    until: jax.Array,
    *,
    stride: int | None = None,
) -> Loop:
    """Decodes until each row has at least `until` tokens (int32 scalar) or has ended.

    A step adds up to k + 1 tokens to a row, and rows advance by different numbers. As in plain
    decoding, all steps are in one loop on the device, and with `loop` donated the cache is written
    in place.

    loop: its state must have a Speculation (`begin_speculation`).
    stride: steps between two checks of the loop's condition (static); see `repeat`. If the proposer
        doesn't always propose: plain decoding steps between two proposals, by default PLAIN_STEPS
        on a GPU, and 1 elsewhere.
    """

    def unfinished(loop: Loop) -> jax.Array:
        return loop.goes_on(until).any()

    return Steps(proposer, model, unfinished).run(loop, unfinished, stride)


def most_proposed(
    state: State,
    alive: jax.Array,
    k: int,
    block: int | None,
    rereads_after: int | None = None,
) -> jax.Array:
    """The most tokens to propose to each row, int32 [batch]; 0 for rows not alive.

    alive: bool [batch]. k: the most for any row. block: tokens of a block of the cache, or None.
    rereads_after: as in DecoderConfig.

    The model draws one token after the proposed ones, so a row that lacks r tokens gets at most r −
    1. In formats with blocks, proposed tokens stay in the newest token's block, which the residual
    holds in 16 bits: a block is encoded when the first token after it is added, so no rejected
    token is ever encoded, and the residual needs no more room. Likewise they stay below the length
    at which a row must be prefilled again.
    """
    most = jnp.clip(state.settings.max_new_tokens - state.counts - 1, 0, k)
    if block is not None:
        most = jnp.minimum(most, block - 1 - state.cache.lengths % block)
    if rereads_after is not None:
        left = rereads_after - 1 - state.cache.lengths
        most = jnp.where(left < 0, most, jnp.minimum(most, left))
    return jnp.where(alive, most, 0)


class Proposed(NamedTuple):
    """A loop with a proposal for its alive rows, bool [batch]."""

    loop: Loop
    proposal: Proposal
    alive: jax.Array


@dataclasses.dataclass(frozen=True)
class Steps:
    """The steps of speculative decoding by one proposer and model.

    unfinished: maps a loop to whether any row continues, a bool scalar.
    """

    proposer: Proposer
    model: Decoder
    unfinished: Callable[[Loop], jax.Array]

    def run(self, loop: Loop, goes_on: Callable[[Loop], jax.Array], stride: int | None) -> Loop:
        """Repeats steps of a loop with a Speculation.

        goes_on: the condition for another turn, a bool scalar; false if the loop is finished.
            stride: as for `decode`.
        """

        def advance(loop: Loop) -> Loop:
            return self.verify(self.propose(loop, loop.state.running & goes_on(loop)))

        if self.proposer.always:
            return repeat(advance, goes_on, loop, stride)
        return self.choose(loop, goes_on, stride or (PLAIN_STEPS if device.on_gpu() else 1))

    def choose(self, loop: Loop, unfinished: Callable[[Loop], jax.Array], stride: int) -> Loop:
        """Repeats verifying steps while any row has a proposal, and plain decoding steps otherwise.

        The two kinds of steps are two inner loops, not a `cond` in one loop, because XLA of jax
        0.10 copies the whole cache into a branch. After each turn the host waits for the GPU to
        choose the next one, so a turn of plain decoding has `stride` steps.
        """

        def goes_on(carry: Proposed, is_proposed: bool) -> jax.Array:
            found = (carry.proposal.counts > 0).any()
            return unfinished(carry.loop) & (found == is_proposed)

        def decode_plainly(carry: Proposed) -> Proposed:
            loop = self.decode_plainly(carry.loop, stride)
            return self.propose(loop, loop.state.running)

        def verify(carry: Proposed) -> Proposed:
            loop = self.verify(carry)
            return self.propose(loop, loop.state.running)

        def run(carry: Proposed) -> Proposed:
            for is_proposed, turn in ((False, decode_plainly), (True, verify)):
                goes_on_so = functools.partial(goes_on, is_proposed=is_proposed)
                carry = jax.lax.while_loop(goes_on_so, turn, carry)
            return carry

        begun = self.propose(loop, loop.state.running)
        return jax.lax.while_loop(lambda carry: unfinished(carry.loop), run, begun).loop

    def propose(self, loop: Loop, alive: jax.Array) -> Proposed:
        """Proposes tokens to each alive row, bool [batch]."""
        state = loop.state
        k, blocks = self.proposer.k, (state.cache.format.block, self.proposer.block)
        block = min((b for b in blocks if b is not None), default=None)
        most = most_proposed(state, alive, k, block, self.model.config.rereads_after)
        context = Context(state, alive, most, self.model)
        proposal, state = self.proposer.propose_to(context)
        return Proposed(dataclasses.replace(loop, state=state), proposal, alive)

    def verify(self, proposed: Proposed, logits: jax.Array | None = None) -> Loop:
        """One step, in which each alive row gets its accepted tokens and one more.

        logits: [rows, positions, vocabulary] of the proposal, if already computed; else None.
        """
        loop, proposal, alive = proposed
        begun = loop.reread(self.model, alive)
        state = begun.state
        if logits is None:
            read = newest(self.model, state, alive, proposal)
        else:
            read = given(logits, jnp.where(alive, proposal.counts + 1, 0))
        state, drawn = step(self.model, state, read, alive, proposal)
        accepted = jnp.minimum(drawn.accepted, drawn.counts)
        done = Speculated(proposal.counts, accepted, alive.astype(jnp.int32))
        end = begun.record(state, drawn)
        return self.settled(loop, end, self.proposer.k + 1, done, drawn.accepted)

    def decode_plainly(self, loop: Loop, stride: int) -> Loop:
        """`stride` plain decoding steps of the running rows, without proposals."""

        def advance(loop: Loop) -> Loop:
            return loop.advance(self.model, loop.state.running & self.unfinished(loop))

        end = several(advance, stride, _with(loop, None))
        nothing = jnp.zeros_like(end.state.counts)
        done = Speculated(nothing, nothing, end.drawn - loop.drawn)
        return self.settled(loop, end, stride, done, nothing)

    def settled(
        self, begin: Loop, end: Loop, most: int, done: Speculated, accepted: jax.Array
    ) -> Loop:
        """The loop `end` with the Speculation of `begin`, updated by the new tokens.

        most: the most new tokens of a row (static). done: the counts to add. accepted: the number
        of accepted tokens, including those after a row's end.
        """
        before, known = begin.state.speculation, begin.state.cache.lengths + 1
        columns = begin.drawn[:, None] + jnp.arange(most)[None]
        columns = jnp.minimum(columns, end.tokens.shape[1] - 1)
        new = jnp.take_along_axis(end.tokens, columns, axis=1)
        history = put(before.history, new, known, end.drawn - begin.drawn)
        own = self.proposer.settle(before.own, known, done.proposed, accepted)
        return _with(end, Speculation(history, own, jax.tree.map(jnp.add, before.done, done)))


def _with(loop: Loop, speculation: Speculation | None) -> Loop:
    state = dataclasses.replace(loop.state, speculation=speculation)
    return dataclasses.replace(loop, state=state)
