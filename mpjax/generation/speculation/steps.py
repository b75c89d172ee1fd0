"""The steps of speculation: propose, verify in one step, keep what the model accepts."""

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

PLAIN_STEPS = 4  # between two proposals on a GPU, where a row is proposed nothing


def create_speculation(
    proposer: Proposer, own: object, tokens: jax.Array, lengths: jax.Array, new: jax.Array
) -> Speculation:
    """The Speculation of rows after prefill: lets the proposer read the prompts.

    own: the proposer's state without prompts. tokens: int [batch, tokens], the prompts, padded on
    the right. lengths: int32 [batch]. new: int32 [batch, columns], of which the first is drawn.
    """
    batch, room = new.shape
    history = jnp.pad(tokens.astype(jnp.int32), ((0, 0), (0, room)))
    history = put(history, new[:, :1], lengths, jnp.ones(batch, jnp.int32))
    # Each array is a buffer of its own: a buffer that appears twice can't be donated.
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
    """Generates until each row has `until` tokens (int32 scalar) or more, or has ended.

    A step adds up to k + 1 tokens to a row, and rows advance by different numbers. As in plain
    decoding, all steps are in one loop on the device, and with `loop` donated the cache is written
    in place.

    loop: one whose state has a Speculation, as `begin` makes it.
    stride: steps that follow each other without a decision of the host (static); see `repeat`. For
        a proposer that does not always propose, steps of plain decoding until the next proposal, by
        default PLAIN_STEPS on a GPU, and 1 elsewhere.
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
    """The most tokens that each row may be proposed, int32 [batch]; 0 for rows not alive.

    alive: bool [batch]. k: the most of any row. block: tokens of a block of the cache, or None.
    rereads_after: as in DecoderConfig.

    The model draws one token after the proposed ones, so a row that lacks r tokens gets r − 1 at
    most. In formats with blocks, the proposed tokens stay in the block of the newest token, which
    the residual holds in 16 bits. A block is encoded when the first token after it comes, and that
    is then a token that stays. So no rejected token is ever encoded, and the residual needs no more
    room. In the same way, they stay in the context behind which a row is read again.
    """
    most = jnp.clip(state.settings.max_new_tokens - state.counts - 1, 0, k)
    if block is not None:
        most = jnp.minimum(most, block - 1 - state.cache.lengths % block)
    if rereads_after is not None:
        left = rereads_after - 1 - state.cache.lengths
        most = jnp.where(left < 0, most, jnp.minimum(most, left))
    return jnp.where(alive, most, 0)


class Proposed(NamedTuple):
    """A loop, with a proposal for its rows that are alive, bool [batch]."""

    loop: Loop
    proposal: Proposal
    alive: jax.Array


@dataclasses.dataclass(frozen=True)
class Steps:
    """The steps of the loop, and what stays the same in all of them.

    unfinished: says of a loop whether any row goes on, as a bool scalar.
    """

    proposer: Proposer
    model: Decoder
    unfinished: Callable[[Loop], jax.Array]

    def run(self, loop: Loop, goes_on: Callable[[Loop], jax.Array], stride: int | None) -> Loop:
        """Repeats steps of a loop with a Speculation.

        goes_on: says whether another turn begins, as a bool scalar; only if the loop is
            unfinished. stride: as for `decode`.
        """

        def advance(loop: Loop) -> Loop:
            return self.verify(self.propose(loop, loop.state.running & goes_on(loop)))

        if self.proposer.always:
            return repeat(advance, goes_on, loop, stride)
        return self.choose(loop, goes_on, stride or (PLAIN_STEPS if device.on_gpu() else 1))

    def choose(self, loop: Loop, unfinished: Callable[[Loop], jax.Array], stride: int) -> Loop:
        """Repeats steps that verify proposals, and steps of plain decoding where there is none.

        The two kinds of step are two loops inside of one. A `cond` in a loop would do, but XLA of
        jax 0.10 copies the whole cache to pass it to a branch. After each turn of a loop the host
        waits for the GPU, to see which comes next; a turn has `stride` steps of plain decoding.
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
        """Tokens for each row that is alive, bool [batch]."""
        state = loop.state
        k, blocks = self.proposer.k, (state.cache.format.block, self.proposer.block)
        block = min((b for b in blocks if b is not None), default=None)
        most = most_proposed(state, alive, k, block, self.model.config.rereads_after)
        context = Context(state, alive, most, self.model.columns)
        proposal, own = self.proposer.propose(context)
        speculation = dataclasses.replace(state.speculation, own=own)
        return Proposed(_with(loop, speculation), proposal, alive)

    def verify(self, proposed: Proposed, logits: jax.Array | None = None) -> Loop:
        """One step, in which each row that is alive gets the tokens that the model accepts.

        logits: [rows, positions, vocabulary], where the model has read the proposal already.
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
        """`stride` steps of a token for each row that goes on; nothing is proposed in between."""

        def advance(loop: Loop) -> Loop:
            return loop.advance(self.model, loop.state.running & self.unfinished(loop))

        end = several(advance, stride, _with(loop, None))
        nothing = jnp.zeros_like(end.state.counts)
        done = Speculated(nothing, nothing, end.drawn - loop.drawn)
        return self.settled(loop, end, stride, done, nothing)

    def settled(
        self, begin: Loop, end: Loop, most: int, done: Speculated, accepted: jax.Array
    ) -> Loop:
        """The loop `end` with the speculation of `begin`, brought up to the new tokens.

        most: new tokens that a row may have (static). done: what was done in between.
        accepted: tokens of the proposal, also those after the end of a row.
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
