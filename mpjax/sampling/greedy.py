"""The likeliest token of each row with its log-probability, in one pass over the logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

PART = 512  # logits of a part
LAST = np.int32(np.iinfo(np.int32).max)  # larger than all token ids

_Partial = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def likeliest(logits: jax.Array, allowed: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """The likeliest token of each row, and its log-probability under the softmax of all logits.

    XLA would make three passes: argmax, maximum, and sum of exponentials. This is one reduction,
    over parts and then over their results, which rescales sums to the larger of two maxima (Milakov
    and Gimelshein, "Online normalizer calculation for softmax", 2018).

    logits: [rows, vocabulary], any float dtype; computed in float32.
    allowed: the logits with -inf for tokens that may not be taken; None if all may.

    Returns tokens int32 [rows] (the lowest id of equal logits), and log-probabilities float32
    [rows]: NaN for a row with a logit of NaN or +inf.
    """
    wide = logits.astype(jnp.float32)
    allowed = wide if allowed is None else allowed.astype(jnp.float32)
    parts = _cut(allowed), _cut(wide)
    # Build ids and counts directly in the padded shape: XLA would constant-fold `_cut` of a
    # vocabulary-sized constant at compile time.
    shape = parts[0].shape
    ids = jax.lax.broadcasted_iota(jnp.int32, (shape[0], shape[1] * PART), 1).reshape(shape)
    counts = jnp.where(ids < wide.shape[1], np.float32(1), np.float32(0))
    each = parts[0], ids, parts[1], counts
    best, token, top, total = _reduced(_reduced(each, 2), 1)
    logprob = best - (top + jnp.log(total))
    return token, jnp.where(jnp.isposinf(top), jnp.nan, logprob)


def _cut(x: jax.Array) -> jax.Array:
    """The rows of x [rows, vocabulary] in parts, [rows, parts, PART], padded with -inf."""
    rows, size = x.shape
    padded = jnp.pad(x, ((0, 0), (0, -size % PART)), constant_values=-jnp.inf)
    return padded.reshape(rows, -1, PART)


def _reduced(parts: _Partial, axis: int) -> _Partial:
    minus = np.float32(-np.inf)
    begun = minus, LAST, minus, np.float32(0)
    found: _Partial = jax.lax.reduce(parts, begun, _joined, (axis,))
    return found


def _joined(one: _Partial, other: _Partial) -> _Partial:
    """Combines the partial results of two parts of a row.

    A partial result: the largest allowed logit and its token, the largest logit, and the sum of
    exp(logit − largest).
    """
    (best, token, top, total), (other_best, other_token, other_top, other_total) = one, other
    # NaN counts as the largest, as in argmax.
    is_nan, is_other_nan = best != best, other_best != other_best
    is_equal = (best == other_best) | (is_nan & is_other_nan)
    is_first = (best > other_best) | (is_nan & ~is_other_nan) | (is_equal & (token < other_token))
    # Two equal infinite maxima would have the difference NaN.
    factor = jnp.where(top == other_top, 1.0, jnp.exp(-jnp.abs(top - other_top)))
    is_larger = top >= other_top
    return (
        jnp.where(is_first, best, other_best),
        jnp.where(is_first, token, other_token),
        jnp.maximum(top, other_top),
        jnp.where(is_larger, total + factor * other_total, other_total + factor * total),
    )
