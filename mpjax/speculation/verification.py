"""Draws the model's tokens at several positions of each row, as plain decoding draws them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from mpjax.decoding_state import DecodingState
from mpjax.decoding_step import Draw, Rule
from mpjax.sampling import Sampling, logprobs, process_logits
from mpjax.speculation import acceptance
from mpjax.speculation.proposer import Proposal


def verify(
    logits: jax.Array, proposal: Proposal, state: DecodingState, rule: Rule, *, divided: bool
) -> tuple[Draw, jax.Array]:
    """The tokens that a row gets after its newest, if the model accepts the proposal.

    logits: [batch, positions, vocabulary], after the newest token and each of the proposed ones.
    rule: how tokens are drawn, and what ends rows.
    divided: whether devices have parts of the logits' vocabulary; see `sample`.

    At position j, penalties and minima count the proposed tokens before j, as plain decoding would.

    Returns a Draw of arrays [batch, positions, …], and the number of accepted tokens a, int32
    [batch]. The tokens up to position a are those of the row.
    """
    batch, positions, vocabulary = logits.shape
    flat, each = logits.reshape(-1, vocabulary), rule.at_positions(positions)
    seen = seen_before(state.seen, proposal.tokens[:, : positions - 1])
    rows = dataclasses.replace(
        state,
        keys=jnp.repeat(state.keys, positions),
        counts=(state.counts[:, None] + jnp.arange(positions)[None]).reshape(-1),
        seen=None if seen is None else seen.reshape(flat.shape),
    )
    if proposal.chances is None or rule.sampling.greedy or positions == 1:
        drawn = each.draw(flat, rows, divided=divided)
        drawn = jax.tree.map(lambda x: x.reshape(batch, positions, *x.shape[1:]), drawn)
        kept = Proposal(proposal.tokens[:, : positions - 1], proposal.counts)
        return drawn, acceptance.count_agreeing(drawn.tokens, kept)
    hidden = each.hide(flat, rows.counts)
    p = distribution(hidden, each.sampling, rows.seen, divided=divided).reshape(logits.shape)
    tokens, accepted = acceptance.accept(p, proposal, state.keys, rule.drawn(state.counts))
    told = each.told(flat)
    told = jax.tree.map(lambda x: x.reshape(batch, positions, *x.shape[1:]), told)
    return Draw(tokens, logprobs(logits, tokens), told), accepted


def seen_before(seen: jax.Array | None, tokens: jax.Array) -> jax.Array | None:
    """Whether a token is in the text before each position, bool [batch, k + 1, vocabulary].

    seen: bool [batch, vocabulary], of the text before the first position; None stays None.
    tokens: int32 [batch, k], proposed at the positions from the first on.
    """
    if seen is None:
        return None
    batch, k = tokens.shape
    row, column = jnp.arange(batch)[:, None], jnp.arange(k)[None] + 1
    marks = jnp.zeros((batch, k + 1, seen.shape[1]), jnp.int8).at[row, column, tokens].set(1)
    return seen[:, None] | (jax.lax.cummax(marks, axis=1) > 0)


def distribution(
    logits: jax.Array, sampling: Sampling, seen: jax.Array | None, *, divided: bool = False
) -> jax.Array:
    """The probabilities from which `sample` draws, float32 [rows, vocabulary].

    A greedy row has 1 for its likeliest token. Arguments are those of `sample`.
    """
    processed = process_logits(logits, sampling, seen, divided=divided)
    probabilities = jax.nn.softmax(processed, axis=-1)
    best = jax.nn.one_hot(jnp.argmax(processed, axis=-1), logits.shape[-1], dtype=jnp.float32)
    temperature = jnp.asarray(sampling.temperature, jnp.float32).reshape(-1, 1)
    return jnp.where(temperature > 0, probabilities, best)
