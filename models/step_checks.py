"""Checks of the arguments of a decoder's step; values are checked only if they are known."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels.checks import are_between, as_array, require_type, shown
from mpjax.models.config import DecoderConfig
from mpjax.models.state import DecoderCache


def require_positions(config: DecoderConfig, tokens: int) -> None:
    """Raises ValueError for a sequence of more tokens than the model has positions."""
    if tokens > config.max_position_embeddings:
        raise ValueError(
            f"a sequence of {tokens} tokens would pass the {config.max_position_embeddings} "
            "positions of this model: shorten it, or load the model with max_positions"
        )


def require_cache(config: DecoderConfig, cache: DecoderCache) -> None:
    """Raises ValueError for a cache that doesn't fit the model."""
    require_type("cache", cache, DecoderCache, hint=", as model.create_cache makes it")
    if len(cache.layers) != config.num_layers:
        raise ValueError(
            f"the cache has {len(cache.layers)} layers, and the model has "
            f"{config.num_layers}: create the cache with model.create_cache"
        )
    if config.scaling_by_length is not None and cache.rotary_lengths is None:
        raise ValueError(
            "the cache has no rotary lengths: create the cache with model.create_cache"
        )


def require_counts(counts: jax.Array, tokens: jax.Array) -> None:
    """Raises ValueError for counts of a wrong shape, and known ones that exceed the tokens."""
    batch, most = tokens.shape
    if counts.shape != (batch,) or not jnp.issubdtype(counts.dtype, jnp.integer):
        raise ValueError(
            f"counts are {shown(counts)}: expected integers of shape ({batch},), one for each "
            "sequence"
        )
    if not are_between(counts, 0, most):
        raise ValueError(
            f"counts are {np.asarray(counts).tolist()}: expected 0 to {most}, the number of tokens "
            "in a row"
        )


def require_empty(cache: DecoderCache) -> None:
    """Raises ValueError for a cache that is known not to be empty."""
    if not are_between(cache.lengths, 0, 0):
        found = np.asarray(cache.lengths).tolist()
        raise ValueError(
            f"the cache holds {found} tokens, and fresh says that it is empty: "
            "leave fresh out, or create another cache"
        )


def read_tokens(config: DecoderConfig, tokens: Any) -> jax.Array:
    """Token ids [batch, tokens] as an array.

    Raises ValueError for another shape or dtype, and for known ids outside the vocabulary.
    """
    tokens, vocabulary = as_array("tokens", tokens), config.vocab_size
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        hint = "; a single sequence is tokens[None]" if tokens.ndim == 1 else ""
        raise ValueError(
            f"tokens are {shown(tokens)}: expected integers of shape [batch, tokens]{hint}"
        )
    if not are_between(tokens, 0, vocabulary - 1):
        raise ValueError(f"tokens must be from 0 to {vocabulary - 1}, the model's vocabulary")
    return tokens
