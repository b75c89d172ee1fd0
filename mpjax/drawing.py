"""The next token of each row, with its log-probability."""

from __future__ import annotations

import jax

from mpjax.greedy import likeliest
from mpjax.sampling import Sampling, logprobs, sample


def draw(
    logits: jax.Array,
    allowed: jax.Array,
    keys: jax.Array,
    sampling: Sampling,
    seen: jax.Array | None = None,
    *,
    divided: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """A token of each row, int32 [rows], and its log-probability, float32 [rows].

    logits: [rows, vocabulary]. allowed: those with -inf for tokens that must not be drawn, from
    which a token is drawn as by `sample`; its log-probability is that of `logprobs`.
    """
    if sampling.greedy and sampling.repetition_penalty is None and not divided:
        return likeliest(logits, allowed)
    drawn = sample(allowed, keys, sampling, seen, divided=divided)
    return drawn, logprobs(logits, drawn)
