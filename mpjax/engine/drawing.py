"""Draws a token for each row, where rows differ in how."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from mpjax.decoding_state import DecodingState
from mpjax.engine.state import ALL, RowSettings
from mpjax.greedy import likeliest
from mpjax.random_keys import row_keys, step_keys
from mpjax.sampling import Sampling, logprobs, sample


@dataclasses.dataclass(frozen=True)
class RowRule:
    """The rule of rows that differ in how they are drawn, for `decoding_step.advance`."""

    settings: RowSettings

    def draw(
        self, logits: jax.Array, state: DecodingState, *, divided: bool
    ) -> tuple[jax.Array, jax.Array]:
        """See `draw`, of which state.seen is an argument."""
        return draw(logits, self.settings, state.counts, state.seen, divided=divided)

    def is_end(self, drawn: jax.Array, chance: jax.Array, counts: jax.Array) -> jax.Array:
        """See `is_end`."""
        return is_end(drawn, chance, self.settings, counts)


def draw(
    logits: jax.Array,
    settings: RowSettings,
    counts: jax.Array,
    seen: jax.Array | None,
    *,
    divided: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """A token for each row, int32 [rows], and its log-probability, float32 [rows].

    logits: [rows, vocabulary]. counts: int32 [rows], new tokens drawn before.
    seen: bool [rows, vocabulary]; or None if all rows are greedy, without a penalty, and have their
        least number of tokens, which spares the device a decision.
    divided: whether devices have parts of the vocabulary's axis; see `sample`.

    A row's token is that of `sample` with the row's settings and key: it does not depend on other
    rows. The log-probability is NaN where a logit is NaN or infinite.
    """
    if seen is None and not divided:
        return likeliest(logits)
    if seen is None:
        drawn = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return drawn, logprobs(logits, drawn)
    hidden = _hide_stop_ids(logits, settings, counts)
    keys = step_keys(row_keys(settings.key_words), counts)
    simple = Sampling(temperature=settings.temperature, repetition_penalty=settings.penalty)
    filtered = dataclasses.replace(
        simple, top_k=settings.top_k, top_p=settings.top_p, min_p=settings.min_p
    )
    is_filtered = (settings.top_k < ALL) | (settings.top_p < 1) | (settings.min_p > 0)
    # Filters sort all logits, which takes longer than the device's wait for the decision.
    drawn = jax.lax.cond(
        (is_filtered & (settings.temperature > 0)).any(),
        lambda x: sample(x, keys, filtered, seen, divided=divided),
        lambda x: sample(x, keys, simple, seen, divided=divided),
        hidden,
    )
    return drawn, logprobs(logits, drawn)


def is_end(
    drawn: jax.Array, chance: jax.Array, settings: RowSettings, counts: jax.Array
) -> jax.Array:
    """Whether each row ends with the token drawn, bool [rows]: it stops, is long enough, or is NaN.

    chance: the log-probability of each token. counts: int32 [rows], with these tokens.
    """
    stops = (drawn[:, None] == settings.stop_ids).any(-1)
    return stops | (counts >= settings.most) | jnp.isnan(chance)


def _hide_stop_ids(logits: jax.Array, settings: RowSettings, counts: jax.Array) -> jax.Array:
    """Logits in which rows that are too short have no stop ids."""
    is_short = counts < settings.least
    rows = jnp.arange(len(logits))[:, None]
    ids = jnp.where(is_short[:, None], settings.stop_ids, logits.shape[1])
    return logits.at[rows, ids].set(-jnp.inf, mode="drop")
