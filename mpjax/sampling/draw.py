"""Draws the next token of each row: greedy, temperature, top-k, top-p, min-p.

Everything here is a pure function of arrays and runs inside `jit`, `vmap` and `while_loop`. Each
row is drawn with its own key, so its token depends neither on its neighbours nor on the size of the
batch.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mpjax.kernels.thresholds.api import threshold
from mpjax.sampling.greedy import likeliest
from mpjax.sampling.processors import Attachment, draw_own
from mpjax.sampling.random_keys import gumbel_noise, row_keys, step_keys
from mpjax.sampling.settings import UNLIMITED, RowSettings

TOP_LOGPROBS = 20  # the most tokens whose log-probabilities are wanted in the place of one
# Division by a smaller temperature could make logits infinite. At this one, already only the most
# likely token is drawn.
LEAST_TEMPERATURE = 2.0**-100
WHOLE = 2.0**30  # the weight of all tokens for top-p, which counts in parts of it

Top = tuple[jax.Array, jax.Array]


class Draw(NamedTuple):
    """A token for each row, int32 [rows], and its log-probability, float32 [rows].

    top_logprobs: the likeliest tokens and their log-probabilities, as `top_logprobs` returns them;
    None where the settings have none.
    """

    tokens: jax.Array
    logprobs: jax.Array
    top_logprobs: Top | None = None


def draw(
    logits: jax.Array,
    settings: RowSettings,
    counts: jax.Array,
    wanted: jax.Array | None = None,
    attached: Attachment = (),
    *,
    divided: bool = False,
) -> Draw:
    """Draws a token for each row.

    logits: [rows, vocabulary], any float dtype; computed in float32.
    counts: int32 [rows], new tokens drawn before, by which the row's key changes.
    wanted: the logits to draw from, float32 [rows, vocabulary], as processors give them; None where
        there are no processors.
    attached: the processors, of which some may draw tokens.
    divided: whether devices have parts of the vocabulary's axis (static). Top-k and top-p then
        search for their thresholds in plain JAX, so that no device needs all logits. The draws are
        the same, except for rounding of the probabilities.

    Among equal logits a greedy row takes the lowest token id. The log-probability is that under the
    softmax of the unmodified logits: NaN for a row with a logit of NaN or +inf, and for one whose
    processors allow no token.
    """
    if wanted is None and settings.greedy and not divided:
        tokens, logprob = likeliest(logits, hide_stop_ids(logits, settings, counts))
    else:
        allowed = allowed_logits(logits, settings, counts, wanted)
        tokens = _choose(allowed, settings, counts, attached, divided=divided)
        logprob = logprobs(logits, tokens)
        if wanted is not None:
            logprob = jnp.where(allowed.max(-1) > -jnp.inf, logprob, jnp.nan)
    top = None
    if settings.top_logprobs is not None:
        top = top_logprobs(logits, settings.top_logprobs)
    return Draw(tokens, logprob, top)


def allowed_logits(
    logits: jax.Array, settings: RowSettings, counts: jax.Array, wanted: jax.Array | None
) -> jax.Array:
    """The logits to draw from, without stop ids of rows that are too short, float32.

    Arguments are those of `draw`. Where processors allow stop ids alone, these stay: a grammar that
    has ended allows nothing else.
    """
    if wanted is None:
        return hide_stop_ids(logits, settings, counts).astype(jnp.float32)
    hidden = hide_stop_ids(wanted, settings, counts)
    return jnp.where(hidden.max(-1, keepdims=True) > -jnp.inf, hidden, wanted)


def _choose(
    logits: jax.Array,
    settings: RowSettings,
    counts: jax.Array,
    attached: Attachment,
    *,
    divided: bool,
) -> jax.Array:
    likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if settings.greedy:
        return draw_own(attached, logits, settings, counts, likeliest)
    keys = step_keys(row_keys(settings.key_words), counts)
    noise = gumbel_noise(keys, logits.shape[1])
    filtered = _filtered(logits, settings, divided=divided)
    drawn = jnp.argmax(filtered + noise, axis=-1).astype(jnp.int32)
    tokens = jnp.where(settings.temperature > 0, drawn, likeliest)
    return draw_own(attached, filtered, settings, counts, tokens)


def is_end(draw: Draw, settings: RowSettings, counts: jax.Array) -> jax.Array:
    """Whether each row ends with its token, bool [rows]: it stops, is long enough, or is NaN.

    counts: int32 [rows], new tokens with these.
    """
    stops = settings.stops(draw.tokens[:, None])[:, 0]
    return stops | (counts >= settings.max_new_tokens) | jnp.isnan(draw.logprobs)


def hide_stop_ids(logits: jax.Array, settings: RowSettings, counts: jax.Array) -> jax.Array:
    """Logits [rows, vocabulary] with -inf for stop ids of rows that are too short to end.

    counts: int32 [rows], new tokens of each row.
    """
    if settings.min_new_tokens is None or not settings.stop_ids.shape[1]:
        return logits
    is_short = (counts < settings.min_new_tokens)[:, None]
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32)[None]
    return jnp.where(is_short & settings.stops(ids), -jnp.inf, logits)


def process_logits(logits: jax.Array, settings: RowSettings, *, divided: bool = False) -> jax.Array:
    """Logits that `draw` draws from, float32 [rows, vocabulary]; removed tokens have -inf.

    The steps and their order are Hugging Face's: temperature, top-k, top-p, min-p, each on the
    result of the step before. A greedy row's logits stay. Arguments are those of `draw`.
    """
    logits = logits.astype(jnp.float32)
    if settings.greedy:
        return logits
    is_drawn = settings.temperature[:, None] > 0
    return jnp.where(is_drawn, _filtered(logits, settings, divided=divided), logits)


def _filtered(logits: jax.Array, settings: RowSettings, *, divided: bool) -> jax.Array:
    """Logits by temperature, after top-k, top-p and min-p; removed logits become -inf."""
    temperature = settings.temperature[:, None]
    divisor = jnp.maximum(temperature, LEAST_TEMPERATURE)
    logits = logits / jnp.where(temperature > 0, divisor, jnp.ones_like(temperature))
    keep = functools.partial(_keep, settings=settings, divided=divided)
    if not settings.varied:
        return keep(logits)
    is_filtered = settings.top_k < UNLIMITED
    is_filtered |= (settings.top_p < 1) | (settings.min_p > 0)
    # Filters read all logits many times, which takes longer than the device's wait for the look.
    is_used = (is_filtered & (settings.temperature > 0)).any()
    kept: jax.Array = jax.lax.cond(is_used, keep, lambda x: x, logits)
    return kept


def _keep(logits: jax.Array, settings: RowSettings, *, divided: bool) -> jax.Array:
    """Logits with -inf in the place of those that top-k, top-p and min-p remove.

    Each filter is a threshold for each row. Logits equal to the threshold stay. Rows that are
    greedy, or have a filter switched off, are not searched for its threshold.
    """
    temperature = settings.temperature[:, None]
    search = functools.partial(threshold, implementation="reference" if divided else None)
    least = jnp.full((logits.shape[0], 1), -jnp.inf, jnp.float32)  # the smallest logit that stays
    if settings.top_k is not None:
        top_k = jnp.maximum(settings.top_k[:, None], 1)
        is_on = (temperature > 0) & (top_k < logits.shape[-1])
        least = search(logits, jnp.where(is_on, top_k, 0))
    if settings.top_p is not None:
        top_p = settings.top_p[:, None]
        kept = jnp.where(logits >= least, logits, -jnp.inf)
        # Whole numbers, whose sums are exact: a token's fate does not depend on an order of sums.
        weights = jnp.round(jax.nn.softmax(kept, axis=-1) * WHOLE).astype(jnp.int32)
        wanted = jnp.maximum(jnp.ceil(top_p * WHOLE), 1).astype(jnp.int32)
        # A top_p of 1 keeps all tokens, whatever the rounding of the sum.
        wanted = jnp.where((temperature > 0) & (top_p < 1), wanted, 0)
        least = jnp.maximum(least, search(logits, wanted, weights))
    if settings.min_p is not None:
        peak = jnp.max(logits, axis=-1, keepdims=True)
        least = jnp.maximum(least, peak + jnp.log(settings.min_p[:, None]))
    return jnp.where(logits >= least, logits, -jnp.inf)


def logprobs(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Log-probability of each token under the softmax of the unmodified logits.

    Args:
      logits: [..., vocabulary], any float dtype; computed in float32.
      tokens: integers [...].

    Returns:
      float32 [...], natural logarithms; NaN for a row with a logit of NaN or +inf.
    """
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    total = jax.nn.logsumexp(logits, axis=-1)
    return jnp.where(jnp.isposinf(total), jnp.nan, chosen - total)


def top_logprobs(logits: jax.Array, wanted: jax.Array, always: int = 0) -> Top:
    """The likeliest tokens and their log-probabilities, int32 and float32 [rows, TOP_LOGPROBS].

    logits: [rows, vocabulary], of which a smaller one has fewer columns in the result. wanted:
    int32 [any rows], how many of them are used. Where none uses more than `always` (0 or 1), the
    others are not computed, and have no meaning.
    """
    number = min(TOP_LOGPROBS, logits.shape[-1])
    logits = logits.astype(jnp.float32)

    def all_(logits: jax.Array) -> Top:
        best, ids = jax.lax.top_k(logits, number)
        return ids, best - jax.nn.logsumexp(logits, axis=-1, keepdims=True)

    def few(logits: jax.Array) -> Top:
        ids, found = no_top_logprobs(logits.shape[:1], logits.shape[1])
        if not always:
            return ids, found
        first = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return ids.at[:, 0].set(first), found.at[:, 0].set(logprobs(logits, first))

    return jax.lax.cond((wanted > always).any(), all_, few, logits)


def no_top_logprobs(shape: tuple[int, ...], vocabulary: int) -> Top:
    """Arrays [*shape, number] in the place of what `top_logprobs` returns."""
    shape = (*shape, min(TOP_LOGPROBS, vocabulary))
    return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
