"""Checks of the arguments of a decoder's step, where their values are known."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels import PagedKVCache
from mpjax.kernels.checks import are_between, shown
from mpjax.models.config import DecoderConfig


def require_positions(config: DecoderConfig, tokens: int) -> None:
    """Raises ValueError for a sequence of more tokens than the model has positions."""
    if tokens > config.max_position_embeddings:
        raise ValueError(
            f"a sequence of {tokens} tokens would pass the {config.max_position_embeddings} "
            "positions of this model: shorten it, or load the model with max_positions"
        )


def require_counts(counts: jax.Array, tokens: jax.Array) -> None:
    """Raises ValueError unless each row of tokens [batch, tokens] has its count, if known."""
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


def require_empty(cache: PagedKVCache) -> None:
    """Raises ValueError for a cache that is known to hold tokens."""
    if not are_between(cache.lengths, 0, 0):
        found = np.asarray(cache.lengths).tolist()
        raise ValueError(
            f"the cache holds {found} tokens, and fresh says that it is empty: "
            "leave fresh out, or create another cache"
        )
