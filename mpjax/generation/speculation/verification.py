"""Verifies proposals: draws from the model's logits at several positions of each row."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mpjax.generation.speculation import acceptance
from mpjax.generation.speculation.proposer import Proposal
from mpjax.generation.state import State
from mpjax.kernels.invariance import in_row_tiles
from mpjax.sampling.draw import (
    Draw,
    allowed_logits,
    draw,
    logprobs,
    process_logits,
    top_logprobs,
)
from mpjax.sampling.processors import Attachment, process_along, repeated
from mpjax.sampling.random_keys import row_keys
from mpjax.sampling.settings import RowSettings


def verify(
    logits: jax.Array, proposal: Proposal, state: State, *, divided: bool
) -> tuple[Draw, jax.Array]:
    """The model's tokens after the newest and each proposed token, and how many are accepted.

    logits: [batch, positions, vocabulary], after the newest token and each of the proposed ones.
    divided: whether the vocabulary axis is sharded; see `draw`.

    At position j, penalties and min_new_tokens count the proposed tokens before j.

    Returns a Draw of arrays [batch, positions, …], and the number of accepted tokens a, int32
    [batch]. The row gets the tokens up to position a.
    """
    batch, positions, vocabulary = logits.shape
    flat, each = logits.reshape(-1, vocabulary), state.settings.repeated(positions)
    wanted, attached = None, repeated(state.processors, positions)
    if attached:
        wanted = process_along(state.processors, logits, proposal.tokens, state.counts)
        wanted = wanted.reshape(flat.shape)
    counts = (state.counts[:, None] + jnp.arange(positions)[None]).reshape(-1)

    def by_position(x: Any) -> Any:
        return jax.tree.map(lambda x: x.reshape(batch, positions, *x.shape[1:]), x)

    draws = any(one.processor.draws for one in state.processors)
    if proposal.probabilities is None or state.settings.greedy or draws:
        drawn = by_position(draw(flat, each, counts, wanted, attached, divided=divided))
        return drawn, acceptance.count_agreeing(drawn.tokens, proposal)
    allowed = allowed_logits(flat, each, counts, wanted)
    p = distribution(allowed, each, attached, divided=divided).reshape(logits.shape)
    keys = row_keys(state.settings.key_words)
    tokens, accepted = acceptance.accept(p, proposal, keys, state.counts)
    top = None
    if state.settings.top_logprobs is not None:
        top = by_position(top_logprobs(flat, state.settings.top_logprobs))
    found = logprobs(logits, tokens)
    if wanted is not None:
        has_any = (allowed.max(-1) > -jnp.inf).reshape(batch, positions)
        found = jnp.where(has_any, found, jnp.nan)
    return Draw(tokens, found, top), accepted


def distribution(
    logits: jax.Array,
    settings: RowSettings,
    attached: Attachment = (),
    *,
    divided: bool = False,
) -> jax.Array:
    """The probabilities that `draw` samples from, float32 [rows, vocabulary].

    A greedy row has 1 for its likeliest token. Arguments are those of `draw`; settings must have a
    temperature.
    """
    processed = process_logits(logits, settings, attached, divided=divided)
    probabilities = in_row_tiles(jax.nn.softmax, processed)
    best = jax.nn.one_hot(jnp.argmax(processed, axis=-1), logits.shape[-1], dtype=jnp.float32)
    return jnp.where(settings.temperature[:, None] > 0, probabilities, best)
