"""Draws a token for each row, where rows differ in how."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from mpjax.decoding_state import DecodingState
from mpjax.decoding_step import Draw, at_positions
from mpjax.engine.state import ALL, CANDIDATES, RowSettings
from mpjax.greedy import likeliest
from mpjax.random_keys import row_keys, step_keys
from mpjax.sampling import Sampling, logprobs, sample


@dataclasses.dataclass(frozen=True)
class RowRule:
    """The rule of rows that differ in how they are drawn, a `decoding_step.Rule`.

    before: int32 [rows], new tokens that a row had before those that its state counts; 0 for none.
    greedy: whether all rows are greedy, without a penalty (static).
    """

    settings: RowSettings
    before: jax.Array | int = 0
    greedy: bool = False

    @property
    def sampling(self) -> Sampling:
        """How tokens are drawn, with filters."""
        return Sampling() if self.greedy else _filtered(self.settings)

    @property
    def maximum(self) -> jax.Array:
        """See Rule."""
        most: jax.Array = self.settings.most - self.before
        return most

    def draw(self, logits: jax.Array, state: DecodingState, *, divided: bool) -> Draw:
        """See `draw`, of which state.seen is an argument."""
        counts = self.drawn(state.counts)
        return draw(logits, self.settings, counts, state.seen, divided=divided)

    def is_end(self, drawn: jax.Array, chance: jax.Array, counts: jax.Array) -> jax.Array:
        """See `is_end`."""
        return is_end(drawn, chance, self.settings, self.drawn(counts))

    def drawn(self, counts: jax.Array) -> jax.Array:
        """See Rule."""
        return counts + self.before

    def told(self, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See Rule."""
        return candidates(logits, self.settings, 0)

    def at_positions(self, positions: int) -> RowRule:
        """See Rule."""
        return RowRule(*at_positions((self.settings, self.before), positions), self.greedy)

    def hide(self, logits: jax.Array, counts: jax.Array) -> jax.Array:
        """See Rule."""
        return _hide_stop_ids(logits, self.settings, self.drawn(counts))


def draw(
    logits: jax.Array,
    settings: RowSettings,
    counts: jax.Array,
    seen: jax.Array | None,
    *,
    divided: bool = False,
) -> Draw:
    """A token for each row, its log-probability, and candidates, unless all rows are greedy.

    logits: [rows, vocabulary]. counts: int32 [rows], new tokens drawn before.
    seen: bool [rows, vocabulary]; or None if all rows are greedy, without a penalty, and have their
        least number of tokens, which spares the device a decision.
    divided: whether devices have parts of the vocabulary's axis; see `sample`.

    A row's token is that of `sample` with the row's settings and key: it does not depend on other
    rows. The log-probability is NaN where a logit is NaN or infinite.
    """
    if seen is None and not divided:
        return Draw(*likeliest(logits))
    if seen is None:
        drawn = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return Draw(drawn, logprobs(logits, drawn))
    hidden = _hide_stop_ids(logits, settings, counts)
    keys = step_keys(row_keys(settings.key_words), counts)
    filtered = _filtered(settings)
    simple = dataclasses.replace(filtered, top_k=None, top_p=None, min_p=None)
    is_filtered = (settings.top_k < ALL) | (settings.top_p < 1) | (settings.min_p > 0)
    # Filters read all logits many times, which takes longer than the device's wait for the
    # decision.
    drawn = jax.lax.cond(
        (is_filtered & (settings.temperature > 0)).any(),
        lambda x: sample(x, keys, filtered, seen, divided=divided),
        lambda x: sample(x, keys, simple, seen, divided=divided),
        hidden,
    )
    return Draw(drawn, logprobs(logits, drawn), candidates(logits, settings, 0))


def candidates(logits: jax.Array, settings: RowSettings, cheap: int) -> tuple[jax.Array, jax.Array]:
    """The likeliest tokens and their log-probabilities, int32 and float32 [rows, number].

    logits: [rows, vocabulary]. settings: of any rows; where none of them wants more than `cheap`
        (0 or 1) candidates, others are not looked for, and have no meaning.
    """
    number = min(CANDIDATES, logits.shape[-1])
    logits = logits.astype(jnp.float32)

    def all_(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        best, ids = jax.lax.top_k(logits, number)
        return ids, best - jax.nn.logsumexp(logits, axis=-1, keepdims=True)

    def few(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        ids, chances = no_candidates(logits.shape[:1], logits.shape[1])
        if not cheap:
            return ids, chances
        first = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return ids.at[:, 0].set(first), chances.at[:, 0].set(logprobs(logits, first))

    return jax.lax.cond((settings.candidates > cheap).any(), all_, few, logits)


def no_candidates(shape: tuple[int, ...], vocabulary: int) -> tuple[jax.Array, jax.Array]:
    """Arrays [*shape, number] for what `candidates` gives."""
    shape = (*shape, min(CANDIDATES, vocabulary))
    return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)


def is_end(
    drawn: jax.Array, chance: jax.Array, settings: RowSettings, counts: jax.Array
) -> jax.Array:
    """Whether each row ends with the token drawn, bool [rows]: it stops, is long enough, or is NaN.

    chance: the log-probability of each token. counts: int32 [rows], with these tokens.
    """
    stops = (drawn[:, None] == settings.stop_ids).any(-1)
    return stops | (counts >= settings.most) | jnp.isnan(chance)


def _filtered(settings: RowSettings) -> Sampling:
    """How rows are drawn, with filters."""
    return Sampling(
        temperature=settings.temperature,
        repetition_penalty=settings.penalty,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
    )


def _hide_stop_ids(logits: jax.Array, settings: RowSettings, counts: jax.Array) -> jax.Array:
    """Logits in which rows that are too short have no stop ids."""
    is_short = counts < settings.least
    rows = jnp.arange(len(logits))[:, None]
    ids = jnp.where(is_short[:, None], settings.stop_ids, logits.shape[1])
    return logits.at[rows, ids].set(-jnp.inf, mode="drop")
