"""Small models whose rotary frequencies depend on a sequence's tokens, and what rows say alone."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

import mpjax
from mpjax.models import Decoder, RopeScaling
from tests.models.small import CONFIG, small_config, small_model

ORIGINAL = 24  # tokens up to which frequencies are those of short sequences
NEW = 40  # tokens behind prompts, of which the first and the last pass ORIGINAL on their way
LENGTHS = (10, 33, 20, ORIGINAL, ORIGINAL + 1)
KINDS = ("longrope", "dynamic")
FACTORS = tuple(np.linspace(1, 4, CONFIG.head_dim // 2).tolist())
SCALINGS = {
    "longrope": RopeScaling(
        "longrope",
        *(4.0, 1.0, 4.0, ORIGINAL),
        short_factors=(1.0,) * len(FACTORS),
        long_factors=FACTORS,
    ),
    "dynamic": RopeScaling("dynamic", 4.0, original_context=ORIGINAL),
}


@functools.cache
def model_of(kind: str, seed: int = 0) -> Decoder:
    return small_model(small_config(rope_scaling=SCALINGS[kind], rope_theta=100.0), seed)


@functools.cache
def prompts() -> list[list[int]]:
    """Prompts of LENGTHS, of which the second begins as the last, for a page of 16."""
    rng = np.random.default_rng(0)
    found = [rng.integers(0, CONFIG.vocab_size, length).tolist() for length in LENGTHS]
    found[1][:20] = found[-1][:20]
    return found


def said(model: Decoder, rows: list[list[int]], new: int = NEW, **options: Any) -> list[list[int]]:
    """The greedy tokens of `generate_tokens` behind prompts."""
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for target, row in zip(tokens, rows, strict=True):
        target[: len(row)] = row
    lengths = jnp.asarray([len(row) for row in rows], jnp.int32)
    options = {"max_new_tokens": new, "sampling": {"stop_ids": ()}} | options
    return np.asarray(mpjax.generate_tokens(model, tokens, lengths, **options).tokens).tolist()


@functools.cache
def said_alone(kind: str) -> list[list[int]]:
    """What each prompt's row says alone."""
    return [said(model_of(kind), [row])[0] for row in prompts()]
