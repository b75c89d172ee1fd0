"""The bytes of a layer's state that a decoding step moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels import KVPages
from mpjax.kernels.kv_cache import residual


def is_pages(state: Any) -> bool:
    """Whether a part of a layer's state is a `KVPages`."""
    return isinstance(state, KVPages)


def moved_bytes(layer: Any, lengths: Sequence[int]) -> int:
    """The bytes of a layer's state that a decoding step of sequences of these lengths moves.

    Keys and values are read. States of fixed size per sequence are read and written.
    """
    parts = jax.tree.leaves(layer, is_leaf=is_pages)
    return sum(cached_bytes(x, lengths) if is_pages(x) else 2 * x.nbytes for x in parts)


def cached_bytes(pages: KVPages, lengths: Sequence[int]) -> int:
    """The bytes of one layer's keys, values and scales for sequences of these lengths.

    In formats with blocks, the tokens of a sequence's last block count as residual, in 16 bits.
    """
    tokens = np.asarray(lengths, np.int64)
    if pages.residual is None:
        return _bytes_of(pages, int(tokens.sum()))
    encoded = np.asarray(residual.begin(jnp.asarray(tokens, jnp.int32), pages.residual.page_size))
    waiting = int((tokens - encoded).sum())
    return _bytes_of(pages, int(encoded.sum())) + _bytes_of(pages.residual, waiting)


def _bytes_of(pages: KVPages, tokens: int) -> int:
    """The bytes of `tokens` tokens in pages: a share of the pages' bytes."""
    share = tokens / (pages.keys.shape[0] * pages.page_size)
    found = 0.0
    for side in pages.sides:
        found += side.words.nbytes * share
        if side.parameters is not None:
            # Static scales are shared by all tokens.
            found += side.parameters.nbytes * (1 if side.codes.has_given_scales else share)
    return round(found)
