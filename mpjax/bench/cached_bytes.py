"""Bytes of a cache that attention has to read."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from mpjax.kernels import KVPages
from mpjax.kernels.kv_cache import residual


def cached_bytes(pages: KVPages, lengths: Sequence[int]) -> int:
    """Bytes of one layer's keys and values, with their scales, of sequences of these lengths.

    Of formats with blocks, the tokens of the last block that a sequence has begun are read in 16
    bits, and not where they will be packed.
    """
    tokens = np.asarray(lengths, np.int64)
    if pages.residual is None:
        return _bytes_of(pages, int(tokens.sum()))
    packed = np.asarray(residual.begin(jnp.asarray(tokens, jnp.int32), pages.residual.page_size))
    waiting = int((tokens - packed).sum())
    return _bytes_of(pages, int(packed.sum())) + _bytes_of(pages.residual, waiting)


def _bytes_of(pages: KVPages, tokens: int) -> int:
    """Those of so many tokens, of the tokens that there is room for."""
    share = tokens / (pages.keys.shape[0] * pages.page_size)
    found = 0.0
    for side in pages.sides:
        found += side.words.nbytes * share
        if side.parameters is not None:
            # Scales that are given are the same for all tokens.
            found += side.parameters.nbytes * (1 if side.codes.has_given_scales else share)
    return round(found)
