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

from mpjax.kernels.invariance import in_row_tiles, is_batch_invariant
from mpjax.kernels.thresholds.api import threshold
from mpjax.kernels.thresholds.keys import LEAST, key_of
from mpjax.sampling.greedy import likeliest
from mpjax.sampling.processors import Attachment, draw_own, filter_own
from mpjax.sampling.random_keys import gumbel_noise, row_keys, step_keys
from mpjax.sampling.settings import UNLIMITED, RowSettings

TOP_LOGPROBS = 20  # the largest number of likeliest tokens returned for a position
# Division by a smaller temperature could overflow. At this one, only the most likely token is drawn
# anyway.
LEAST_TEMPERATURE = 2.0**-100
WHOLE = 2.0**30  # top-p sums integer probabilities in units of 1/WHOLE

Top = tuple[jax.Array, jax.Array]


class Draw(NamedTuple):
    """A token for each row, int32 [rows], and its log-probability, float32 [rows].

    top_logprobs: the likeliest tokens and their log-probabilities, as `top_logprobs` returns them;
    None if the settings ask for none.
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
    counts: int32 [rows], the number of new tokens so far, folded into the row's key.
    wanted: the logits after all processors, float32 [rows, vocabulary]; None without processors.
    attached: the processors, some of which may draw tokens themselves.
    divided: whether the vocabulary axis is sharded over devices (static). Top-k and top-p then
        search for their thresholds in plain JAX, so that no device needs all logits. Draws are the
        same, except for rounding of the probabilities.

    Among equal logits a greedy row takes the lowest token id. The log-probability is that under the
    softmax of the unmodified logits: NaN for a row with a logit of NaN or +inf, and for one whose
    processors allow no token.
    """
    if wanted is None and settings.greedy and not divided and not is_batch_invariant():
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
    """The logits to draw from, float32, with -inf for stop ids of rows below min_new_tokens.

    Arguments are those of `draw`. If processors allow only stop ids, these stay: a grammar that has
    ended allows nothing else.
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
    is_drawn = settings.temperature > 0

    def sampled(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        keys = step_keys(row_keys(settings.key_words), counts)
        noise = gumbel_noise(keys, logits.shape[1])
        filtered = _filtered(logits, settings, attached, divided=divided)
        drawn = jnp.argmax(filtered + noise, axis=-1).astype(jnp.int32)
        return jnp.where(is_drawn, drawn, likeliest), filtered

    if not settings.varied or any(one.processor.draws for one in attached):
        tokens, filtered = sampled(logits)
        return draw_own(attached, filtered, settings, counts, tokens)
    # Noise for all logits takes long where all rows are greedy.
    tokens = jax.lax.cond(is_drawn.any(), lambda x: sampled(x)[0], lambda _: likeliest, logits)
    return tokens


def is_end(draw: Draw, settings: RowSettings, counts: jax.Array) -> jax.Array:
    """Whether each row ends, bool [rows]: by a stop id, by its length, or by NaN logits.

    counts: int32 [rows], the number of new tokens including these.
    """
    stops = settings.stops(draw.tokens[:, None])[:, 0]
    return stops | (counts >= settings.max_new_tokens) | jnp.isnan(draw.logprobs)


def hide_stop_ids(logits: jax.Array, settings: RowSettings, counts: jax.Array) -> jax.Array:
    """Logits [rows, vocabulary] with -inf for stop ids of rows below min_new_tokens.

    counts: int32 [rows], the number of new tokens.
    """
    if settings.min_new_tokens is None or not settings.stop_ids.shape[1]:
        return logits
    is_short = (counts < settings.min_new_tokens)[:, None]
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32)[None]
    return jnp.where(is_short & settings.stops(ids), -jnp.inf, logits)


def process_logits(
    logits: jax.Array,
    settings: RowSettings,
    attached: Attachment = (),
    *,
    divided: bool = False,
) -> jax.Array:
    """The logits that `draw` samples from, float32 [rows, vocabulary]; -inf for removed tokens.

    The steps and their order are Hugging Face's: temperature, top-k, top-p, min-p, then processors
    that filter, each on the result of the previous step. A greedy row's logits don't change.
    Arguments are those of `draw`.
    """
    logits = logits.astype(jnp.float32)
    if settings.greedy:
        return logits
    is_drawn = settings.temperature[:, None] > 0
    return jnp.where(is_drawn, _filtered(logits, settings, attached, divided=divided), logits)


def _filtered(
    logits: jax.Array, settings: RowSettings, attached: Attachment, *, divided: bool
) -> jax.Array:
    """Logits divided by the temperature, with -inf for those that filters remove."""
    temperature = settings.temperature[:, None]
    divisor = jnp.maximum(temperature, LEAST_TEMPERATURE)
    logits = logits / jnp.where(temperature > 0, divisor, jnp.ones_like(temperature))
    keep = functools.partial(_keep, settings=settings, divided=divided)
    if not settings.varied:
        return filter_own(attached, keep(logits))
    is_filtered = settings.top_k < UNLIMITED
    is_filtered |= (settings.top_p < 1) | (settings.min_p > 0)
    # Filters read all logits many times.
    is_used = (is_filtered & (settings.temperature > 0)).any()
    return filter_own(attached, jax.lax.cond(is_used, keep, lambda x: x, logits))


def _keep(logits: jax.Array, settings: RowSettings, *, divided: bool) -> jax.Array:
    """Logits with -inf for those that top-k, top-p and min-p remove.

    Each filter is a threshold per row; logits equal to it stay. No threshold is searched for greedy
    rows and for filters that are off.
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
        # Integers, whose sums are exact, so that the result doesn't depend on the order of sums.
        weights = jnp.round(in_row_tiles(jax.nn.softmax, kept) * WHOLE).astype(jnp.int32)
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
    total = _log_totals(logits)
    return jnp.where(jnp.isposinf(total), jnp.nan, chosen - total)


def _log_totals(logits: jax.Array) -> jax.Array:
    """The logarithms [...] of the sums of exp(logits), of float32 [..., vocabulary]."""
    return in_row_tiles(functools.partial(jax.nn.logsumexp, axis=-1), logits)


def top_logprobs(logits: jax.Array, wanted: jax.Array, always: int = 0) -> Top:
    """The likeliest ids and their log-probabilities, int32 and float32 [rows, TOP_LOGPROBS].

    logits: [rows, vocabulary]; a vocabulary below TOP_LOGPROBS gives fewer columns. wanted: int32
    [any rows], how many of them are used. If no row uses more than `always` (0 or 1), the other
    columns are not computed and are meaningless.
    """
    number = min(TOP_LOGPROBS, logits.shape[-1])
    logits = logits.astype(jnp.float32)

    def all_(logits: jax.Array) -> Top:
        ids = _largest(logits, number)
        best = jnp.take_along_axis(logits, ids, axis=1)
        return ids, best - _log_totals(logits)[..., None]

    def few(logits: jax.Array) -> Top:
        ids, found = no_top_logprobs(logits.shape[:1], logits.shape[1])
        if not always:
            return ids, found
        first = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return ids.at[:, 0].set(first), found.at[:, 0].set(logprobs(logits, first))

    return jax.lax.cond((wanted > always).any(), all_, few, logits)


def _largest(logits: jax.Array, number: int) -> jax.Array:
    """The ids of the largest logits, int32 [rows, number], largest first, equal ones by id.

    They are those of `jax.lax.top_k`, whose sort XLA can't put into a CUDA graph: the device would
    wait for the host at the condition around it.
    """
    keys, found = key_of(logits), []
    columns = jnp.arange(logits.shape[1], dtype=jnp.int32)[None]
    for _ in range(number):
        found.append(jnp.argmax(keys, axis=1, keepdims=True).astype(jnp.int32))
        keys = jnp.where(columns == found[-1], LEAST, keys)
    return jnp.concatenate(found, axis=1)


def no_top_logprobs(shape: tuple[int, ...], vocabulary: int) -> Top:
    """Zeros of the dtypes of `top_logprobs`, [*shape, number]."""
    shape = (*shape, min(TOP_LOGPROBS, vocabulary))
    return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
