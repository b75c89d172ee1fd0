"""Draws the model's tokens at several positions of each row, as plain decoding draws them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.decoding_state import DecodingState, Limits
from mpjax.drawing import draw
from mpjax.random_keys import step_keys
from mpjax.sampling import Sampling, logprobs, process_logits
from mpjax.speculation import acceptance
from mpjax.speculation.proposer import Proposal


def verify(
    logits: jax.Array,
    proposal: Proposal,
    state: DecodingState,
    rules: tuple[Sampling, Limits],
    *,
    divided: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The tokens that a row gets behind its newest, if the model accepts the proposal.

    logits: [batch, positions, vocabulary], behind the newest token and each of the proposed ones.
    rules: how tokens are drawn, and what ends rows.
    divided: whether devices have parts of the logits' vocabulary; see `sample`.

    At position j, penalties and minima count the proposed tokens before j, as plain decoding would.

    Returns tokens int32 and their log-probabilities float32 [batch, positions], and the number of
    accepted tokens a, int32 [batch]. The tokens up to position a are those of the row.
    """
    sampling, limits = rules
    batch, positions, vocabulary = logits.shape
    counts = state.counts[:, None] + jnp.arange(positions)[None]
    allowed = hide_stop_ids(logits, counts, sampling, limits)
    seen = seen_before(state.seen, proposal.tokens[:, : positions - 1])
    rows = allowed.reshape(-1, vocabulary)
    seen_by_rows = None if seen is None else seen.reshape(rows.shape)
    each = of_positions(sampling, positions)
    if proposal.chances is None or sampling.greedy or positions == 1:
        keys = step_keys(jnp.repeat(state.keys, positions), counts.reshape(-1))
        unchanged = logits.reshape(rows.shape)
        drawn, chances = draw(unchanged, rows, keys, each, seen_by_rows, divided=divided)
        tokens, chances = (x.reshape(batch, positions) for x in (drawn, chances))
        kept = Proposal(proposal.tokens[:, : positions - 1], proposal.counts)
        return tokens, chances, acceptance.count_agreeing(tokens, kept)
    p = distribution(rows, each, seen_by_rows).reshape(logits.shape)
    tokens, accepted = acceptance.accept(p, proposal, state.keys, state.counts)
    return tokens, logprobs(logits, tokens), accepted


def hide_stop_ids(
    logits: jax.Array, counts: jax.Array, sampling: Sampling, limits: Limits
) -> jax.Array:
    """Logits [batch, positions, vocabulary] without stop tokens where a row is too short to end.

    counts: int32 [batch, positions], new tokens before each position.
    """
    if sampling.min_new_tokens is None:
        return logits
    is_stop = limits.stops(jnp.arange(logits.shape[-1]))
    least = jnp.asarray(sampling.min_new_tokens, jnp.int32).reshape(-1, 1)
    return jnp.where((counts < least)[..., None] & is_stop[None, None], -jnp.inf, logits)


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


def of_positions(sampling: Sampling, positions: int) -> Sampling:
    """A Sampling in which each position of a row is a row, with the row's numbers."""

    def repeated(value: Any) -> Any:
        return jnp.repeat(value, positions) if np.ndim(value) else value

    return jax.tree.map(repeated, sampling)


def distribution(logits: jax.Array, sampling: Sampling, seen: jax.Array | None) -> jax.Array:
    """The probabilities from which `sample` draws, float32 [rows, vocabulary].

    A greedy row has 1 for its likeliest token. Arguments are those of `sample`.
    """
    processed = process_logits(logits, sampling, seen)
    chances = jax.nn.softmax(processed, axis=-1)
    best = jax.nn.one_hot(jnp.argmax(processed, axis=-1), logits.shape[-1], dtype=jnp.float32)
    temperature = jnp.asarray(sampling.temperature, jnp.float32).reshape(-1, 1)
    return jnp.where(temperature > 0, chances, best)
