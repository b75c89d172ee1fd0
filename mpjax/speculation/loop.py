"""The speculative generation loop: propose, verify in one step, keep what the model accepts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mpjax.decoding_state import DecodingState, Limits, repeat, several
from mpjax.decoding_step import BatchRule, Draw, Rule, reread
from mpjax.kernels import PagedKVCache, device
from mpjax.kernels.checks import is_known
from mpjax.models import Decoder
from mpjax.sampling import Sampling
from mpjax.speculation.proposer import Context, Proposal, Proposer, Speculated, Speculation, put
from mpjax.speculation.verification import verify

PLAIN_STEPS = 4  # between two proposals on a GPU, where a row is proposed nothing


def begin(
    proposer: Proposer, state: DecodingState, tokens: jax.Array, lengths: jax.Array
) -> DecodingState:
    """Adds a Speculation to a state after prefill, and lets the proposer read the prompts.

    tokens: int [batch, tokens], the prompts, padded on the right. lengths: int32 [batch].
    """
    batch, padded = tokens.shape
    own = proposer.create(batch, padded + state.tokens.shape[1])
    read = _jit_read if is_known(state.logprobs) else _traced_read
    speculation = read(proposer, own, tokens, lengths, state.tokens)
    return dataclasses.replace(state, speculation=speculation)


def _read(
    proposer: Proposer,
    own: object,
    tokens: jax.Array,
    lengths: jax.Array,
    new: jax.Array,
) -> Speculation:
    batch, room = new.shape
    history = jnp.pad(tokens.astype(jnp.int32), ((0, 0), (0, room)))
    one = jnp.ones(batch, jnp.int32)
    history = put(history, new[:, :1], lengths, one)
    # Each array is a buffer of its own: a buffer that appears twice can't be donated.
    done = Speculated(*(jnp.zeros(batch, jnp.int32) for _ in range(3)))
    return Speculation(history, proposer.read(own, tokens, lengths), done)


# The proposer's own cache is donated, so that XLA reuses its buffers.
_jit_read, _traced_read = jax.jit(_read, donate_argnames="own"), jax.jit(_read)


def decode(
    proposer: Proposer,
    model: Decoder,
    state: DecodingState,
    sampling: Sampling,
    limits: Limits,
    until: jax.Array,
    *,
    stride: int | None = None,
) -> DecodingState:
    """Generates until each row has `until` tokens (int32 scalar) or more, or is finished.

    A step adds up to k + 1 tokens to a row, and rows advance by different numbers. As in plain
    decoding, all steps are in one loop on the device, and with `state` donated the cache is written
    in place.

    state: one that `begin` has prepared.
    stride: steps that follow each other without a decision of the host (static); see `repeat`. For
        a proposer that does not always propose, steps of plain decoding until the next proposal, by
        default PLAIN_STEPS on a GPU, and 1 elsewhere.
    """

    def unfinished(state: DecodingState) -> jax.Array:
        return (~state.finished & (state.counts < until)).any()

    steps = Steps(proposer, model, BatchRule(sampling, limits), unfinished)
    return steps.run(state, unfinished, stride)


def most_proposed(
    state: DecodingState,
    maximum: jax.Array,
    alive: jax.Array,
    k: int,
    block: int | None,
    rereads_after: int | None = None,
) -> jax.Array:
    """The most tokens that each row may be proposed, int32 [batch]; 0 for rows not alive.

    maximum: int32 [batch], the most new tokens of each row. alive: bool [batch]. k: the most of any
    row. block: tokens of a block of the cache, or None. rereads_after: as in DecoderConfig.

    The model draws one token after the proposed ones, so a row that lacks r tokens gets r − 1 at
    most. In formats with blocks, the proposed tokens stay in the block of the newest token, which
    the residual holds in 16 bits. A block is encoded when the first token after it comes, and that
    is then a token that stays. So no rejected token is ever encoded, and the residual needs no more
    room. In the same way, they stay in the context behind which a row is read again.
    """
    most = jnp.clip(maximum - state.counts - 1, 0, k)
    if block is not None:
        most = jnp.minimum(most, block - 1 - state.cache.lengths % block)
    if rereads_after is not None:
        left = rereads_after - 1 - state.cache.lengths
        most = jnp.where(left < 0, most, jnp.minimum(most, left))
    return jnp.where(alive, most, 0)


class _Proposed(NamedTuple):
    """A state, with a proposal for its rows that are alive, bool [batch]."""

    state: DecodingState
    proposal: Proposal
    alive: jax.Array


class _Drawn(NamedTuple):
    """The results of a step: a Draw of arrays [batch, positions, …], accepted, the cache."""

    draw: Draw
    accepted: jax.Array
    cache: PagedKVCache


@dataclasses.dataclass(frozen=True)
class Steps:
    """The steps of the loop, and what stays the same in all of them.

    unfinished: says of a state whether any row goes on, as a bool scalar.
    """

    proposer: Proposer
    model: Decoder
    rule: Rule
    unfinished: Callable[[DecodingState], jax.Array]

    def run(
        self,
        state: DecodingState,
        goes_on: Callable[[DecodingState], jax.Array],
        stride: int | None,
    ) -> DecodingState:
        """Repeats steps of a state with a Speculation.

        goes_on: says whether another turn begins, as a bool scalar; only if the state is
            unfinished. stride: as for `decode`.
        """

        def advance(state: DecodingState) -> DecodingState:
            return self.verify(self.propose(state, ~state.finished & goes_on(state)))

        if self.proposer.always:
            return repeat(advance, goes_on, state, stride)
        return self.choose(state, goes_on, stride or (PLAIN_STEPS if device.on_gpu() else 1))

    def choose(
        self, state: DecodingState, unfinished: Callable[[DecodingState], jax.Array], stride: int
    ) -> DecodingState:
        """Repeats steps that verify proposals, and steps of plain decoding where there is none.

        The two kinds of step are two loops inside of one. A `cond` in a loop would do, but XLA of
        jax 0.10 copies the whole cache to pass it to a branch. After each turn of a loop the host
        waits for the GPU, to see which comes next; a turn has `stride` steps of plain decoding.
        """

        def goes_on(carry: _Proposed, is_proposed: bool) -> jax.Array:
            found = (carry.proposal.counts > 0).any()
            return unfinished(carry.state) & (found == is_proposed)

        def decode_plainly(carry: _Proposed) -> _Proposed:
            state = self.decode_plainly(carry.state, stride)
            return self.propose(state, ~state.finished)

        def verify(carry: _Proposed) -> _Proposed:
            state = self.verify(carry)
            return self.propose(state, ~state.finished)

        def run(carry: _Proposed) -> _Proposed:
            for is_proposed, turn in ((False, decode_plainly), (True, verify)):
                goes_on_so = functools.partial(goes_on, is_proposed=is_proposed)
                carry = jax.lax.while_loop(goes_on_so, turn, carry)
            return carry

        begun = self.propose(state, ~state.finished)
        return jax.lax.while_loop(lambda carry: unfinished(carry.state), run, begun).state

    def propose(self, state: DecodingState, alive: jax.Array) -> _Proposed:
        """Tokens for each row that is alive, bool [batch]."""
        k, blocks = self.proposer.k, (state.cache.format.block, self.proposer.block)
        block = min((b for b in blocks if b is not None), default=None)
        most = most_proposed(
            *(state, self.rule.maximum, alive, k, block), self.model.config.rereads_after
        )
        drawn = self.rule.drawn(state.counts)
        context = Context(state, self.rule.sampling, alive, most, drawn, self.model.columns)
        proposal, own = self.proposer.propose(context)
        speculation = dataclasses.replace(state.speculation, own=own)
        state = dataclasses.replace(state, speculation=speculation)
        return _Proposed(state, proposal, alive)

    def verify(self, proposed: _Proposed) -> DecodingState:
        """One step, in which each row that is alive gets the tokens that the model accepts."""
        state, proposal, alive = proposed
        drawn = self.read(state, proposal, alive)
        counts = self.kept(state, drawn, alive)
        accepted = jnp.minimum(drawn.accepted, counts)
        done = Speculated(proposal.counts, accepted, alive.astype(jnp.int32))
        end = self.record(state, drawn, counts)
        return self.settled(state, end, self.proposer.k + 1, done, drawn.accepted)

    def decode_plainly(self, state: DecodingState, stride: int) -> DecodingState:
        """`stride` steps of a token for each row that goes on; nothing is proposed in between."""
        batch = len(state.tokens)
        nothing = Proposal(jnp.zeros((batch, 0), jnp.int32), jnp.zeros(batch, jnp.int32))

        def advance(state: DecodingState) -> DecodingState:
            alive = ~state.finished & self.unfinished(state)
            drawn = self.read(state, nothing, alive)
            return self.record(state, drawn, self.kept(state, drawn, alive))

        end = several(advance, stride, dataclasses.replace(state, speculation=None))
        done = Speculated(nothing.counts, nothing.counts, end.counts - state.counts)
        return self.settled(state, end, stride, done, nothing.counts)

    def settled(
        self,
        begin: DecodingState,
        end: DecodingState,
        most: int,
        done: Speculated,
        accepted: jax.Array,
    ) -> DecodingState:
        """The state `end` with the speculation of `begin`, brought up to the new tokens.

        most: new tokens that a row may have (static). done: what was done in between.
        accepted: tokens of the proposal, also those after the end of a row.
        """
        before, known = begin.speculation, begin.cache.lengths + 1
        counts = end.counts - begin.counts
        columns = begin.counts[:, None] + jnp.arange(most)[None]
        columns = jnp.minimum(columns, end.tokens.shape[1] - 1)
        new = jnp.take_along_axis(end.tokens, columns, axis=1)
        history = put(before.history, new, known, counts)
        own = self.proposer.settle(before.own, known, done.proposed, accepted)
        speculation = Speculation(history, own, jax.tree.map(jnp.add, before.done, done))
        return dataclasses.replace(end, step=end.counts.max(), speculation=speculation)

    def read(self, state: DecodingState, proposal: Proposal, alive: jax.Array) -> _Drawn:
        """Reads each row's newest token and its proposed ones, and draws a token after each."""
        state = reread(self.model, state, alive)
        last = jnp.maximum(state.counts - 1, 0)[:, None]
        newest = jnp.take_along_axis(state.tokens, last, axis=1)
        inputs = jnp.concatenate([newest, proposal.tokens], axis=1)
        counts = jnp.where(alive, proposal.counts + 1, 0)
        logits, cache = self.model.step(inputs, counts, state.cache, every_position=True)
        divided = self.model.shards > 1
        found = verify(logits, proposal, state, self.rule, divided=divided)
        return _Drawn(*found, cache)

    def kept(self, state: DecodingState, drawn: _Drawn, alive: jax.Array) -> jax.Array:
        """The number of new tokens of each row, int32 [batch]: up to the one that ends it."""
        is_end = self.is_end(state, drawn)
        to_end = jnp.where(is_end.any(1), jnp.argmax(is_end, axis=1) + 1, is_end.shape[1])
        counts = jnp.minimum(drawn.accepted + 1, to_end.astype(jnp.int32))
        return jnp.where(alive, counts, 0)

    def is_end(self, state: DecodingState, drawn: _Drawn) -> jax.Array:
        """Whether a row would end with the token at each position, bool [batch, positions]."""
        tokens, logprobs = drawn.draw.tokens, drawn.draw.logprobs
        counts = state.counts[:, None] + 1 + jnp.arange(tokens.shape[1])[None]
        return jax.vmap(self.rule.is_end, in_axes=1, out_axes=1)(tokens, logprobs, counts)

    def record(self, state: DecodingState, drawn: _Drawn, counts: jax.Array) -> DecodingState:
        """The state with counts[b] more tokens of each row b."""
        begin, tokens = state.counts, drawn.draw.tokens
        is_new = jnp.arange(tokens.shape[1])[None] < counts[:, None]
        seen = state.seen
        if seen is not None:
            seen = seen.at[jnp.arange(len(seen))[:, None], tokens].max(is_new)

        def record(target: jax.Array, new: jax.Array) -> jax.Array:
            return put(target, new, begin, counts)

        return dataclasses.replace(
            state,
            # Keys and values after the kept tokens are overwritten by the next step's.
            cache=dataclasses.replace(drawn.cache, lengths=state.cache.lengths + counts),
            tokens=record(state.tokens, tokens),
            logprobs=record(state.logprobs, drawn.draw.logprobs),
            counts=begin + counts,
            finished=state.finished | (is_new & self.is_end(state, drawn)).any(1),
            seen=seen,
            candidates=jax.tree.map(record, state.candidates, drawn.draw.candidates),
        )
