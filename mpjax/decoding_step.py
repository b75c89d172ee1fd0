"""The decoding step that all plain generation repeats: attend, draw, record, and end rows."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from mpjax import drawing
from mpjax.decoding_state import DecodingState, Limits
from mpjax.models import Decoder
from mpjax.models.rereading import read_again
from mpjax.random_keys import step_keys
from mpjax.sampling import Sampling

Settings = TypeVar("Settings")


class Draw(NamedTuple):
    """A token for each row, int32 [batch], and its log-probability, float32 [batch].

    candidates: as in DecodingState, [batch, number] both; None if they are not asked for.
    """

    tokens: jax.Array
    logprobs: jax.Array
    candidates: tuple[jax.Array, jax.Array] | None = None


class Rule(Protocol):
    """How the tokens of rows are drawn, and what ends rows."""

    @property
    def sampling(self) -> Sampling:
        """How tokens are drawn."""

    @property
    def maximum(self) -> jax.Array:
        """The most new tokens of each row in a state, int32 [batch]."""

    def draw(self, logits: jax.Array, state: DecodingState, *, divided: bool) -> Draw:
        """A token for each row.

        logits: [batch, vocabulary], any float dtype. divided: whether devices have parts of them.
        """

    def is_end(self, drawn: jax.Array, logprob: jax.Array, counts: jax.Array) -> jax.Array:
        """Whether a row ends with its token, bool [batch].

        logprob: the tokens' log-probabilities. counts: int32 [batch], new tokens with these.
        """

    def drawn(self, counts: jax.Array) -> jax.Array:
        """The new tokens of rows, int32, also those that a state does not count."""

    def told(self, logits: jax.Array) -> tuple[jax.Array, jax.Array] | None:
        """The likeliest tokens and their log-probabilities, as `Draw.candidates`.

        logits: [batch, vocabulary].
        """

    def at_positions(self, positions: int) -> Rule:
        """The rule of a batch that has a row for each position of each row."""

    def hide(self, logits: jax.Array, counts: jax.Array) -> jax.Array:
        """Logits [batch, vocabulary] with -inf for stop tokens of rows that are too short to end.

        counts: int32 [batch], new tokens of each row.
        """


@dataclasses.dataclass(frozen=True)
class BatchRule:
    """The rule of a batch whose rows have been generated together from their first token on."""

    sampling: Sampling
    limits: Limits

    @property
    def maximum(self) -> jax.Array:
        """See Rule."""
        return self.limits.maximum

    def draw(self, logits: jax.Array, state: DecodingState, *, divided: bool) -> Draw:
        """See Rule."""
        allowed = self.hide(logits, state.counts)
        keys = step_keys(state.keys, state.counts)
        return Draw(
            *drawing.draw(logits, allowed, keys, self.sampling, state.seen, divided=divided)
        )

    def is_end(self, drawn: jax.Array, logprob: jax.Array, counts: jax.Array) -> jax.Array:
        """See Rule."""
        return self.limits.stops(drawn) | (counts >= self.limits.maximum)

    def drawn(self, counts: jax.Array) -> jax.Array:
        """See Rule."""
        return counts

    def told(self, logits: jax.Array) -> None:
        """See Rule: no candidates."""

    def at_positions(self, positions: int) -> BatchRule:
        """See Rule."""
        limits = dataclasses.replace(
            self.limits, maximum=at_positions(self.limits.maximum, positions)
        )
        return BatchRule(at_positions(self.sampling, positions), limits)

    def hide(self, logits: jax.Array, counts: jax.Array) -> jax.Array:
        """See Rule."""
        if self.sampling.min_new_tokens is None:
            return logits
        is_short = counts < jnp.asarray(self.sampling.min_new_tokens, jnp.int32)
        is_stop = self.limits.stops(jnp.arange(logits.shape[1]))
        return jnp.where(is_short[:, None] & is_stop[None], -jnp.inf, logits)


def at_positions(settings: Settings, positions: int) -> Settings:
    """The settings of rows, repeated for each of their positions.

    settings: a pytree of numbers, and of arrays [batch, …].
    """

    def repeated(value: Any) -> Any:
        return jnp.repeat(value, positions, axis=0) if np.ndim(value) else value

    repeated_settings: Settings = jax.tree.map(repeated, settings)
    return repeated_settings


def advance(model: Decoder, state: DecodingState, rule: Rule, alive: jax.Array) -> DecodingState:
    """Reads the newest token of rows, and draws the next.

    alive: bool [batch], rows that go on. Others add nothing to the cache, and nothing is recorded
        for them. The newest token of a row that goes on is in the column before state.step.
    """
    newest = jnp.take_along_axis(
        state.tokens, jnp.full_like(state.counts, state.step - 1)[:, None], 1
    )
    state = reread(model, state, alive)
    logits, cache = model.step(newest, alive.astype(jnp.int32), state.cache)
    state = dataclasses.replace(state, cache=cache)
    return draw(state, logits, rule, alive, divided=model.shards > 1)


def reread(model: Decoder, state: DecodingState, alive: jax.Array) -> DecodingState:
    """The state before rows that are alive, bool [batch], go on by a token; see `read_again`."""
    if state.prompts is None:
        return state
    cache = read_again(model, state.cache, alive.astype(jnp.int32), state.text)
    return dataclasses.replace(state, cache=cache)


def draw(
    state: DecodingState, logits: jax.Array, rule: Rule, alive: jax.Array, *, divided: bool
) -> DecodingState:
    """Draws a token for each row and records it where `alive` (bool [batch]), at state.step.

    logits, divided: as for Rule.draw.
    """
    drawn, logprob, candidates = rule.draw(logits, state, divided=divided)
    counts = state.counts + alive.astype(jnp.int32)
    seen = state.seen
    if seen is not None:
        seen = seen.at[jnp.arange(len(drawn)), drawn].max(alive)

    def record(target: jax.Array, new: jax.Array) -> jax.Array:
        # Rows that are not alive keep the old value: zeros, or after the last step the last column,
        # to which dynamic_slice clamps.
        old = jax.lax.dynamic_slice_in_dim(target, state.step, 1, axis=1)
        goes_on = jax.lax.expand_dims(alive, range(1, target.ndim))
        new = jnp.where(goes_on, new[:, None], old)
        return jax.lax.dynamic_update_slice_in_dim(target, new, state.step, axis=1)

    return dataclasses.replace(
        state,
        tokens=record(state.tokens, drawn),
        logprobs=record(state.logprobs, logprob),
        counts=counts,
        finished=state.finished | (alive & rule.is_end(drawn, logprob, counts)),
        seen=seen,
        step=state.step + alive.any().astype(jnp.int32),
        candidates=jax.tree.map(record, state.candidates, candidates),
    )
