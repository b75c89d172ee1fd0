"""Kinds of numbers that attention meets: each makes queries, keys and values of normal ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

# Queries [batch, tokens, heads, dim], and keys and values [pages, KV heads, page size, dim].
Numbers = tuple[np.ndarray, np.ndarray, np.ndarray]


def normal(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> Numbers:
    return queries, keys, values


def outlier(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> Numbers:
    """A channel is 50 times as strong as the rest."""
    keys[..., 7] *= 50
    values[..., 11] *= 50
    return queries, keys, values


def uniform(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> Numbers:
    """All keys weigh nearly the same: the result is a small difference of large sums."""
    return queries * 0.01, keys, values


def small(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> Numbers:
    """Values are around a thousandth."""
    return queries, keys, values * 1e-3


def positive(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> Numbers:
    """Values are around a thousandth, and of one sign."""
    return queries, keys, 1e-3 + 3e-4 * values


def near(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> Numbers:
    """Values are a thousandth from one."""
    return queries, keys, 1 + 1e-3 * values


def flat(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> Numbers:
    """Keys are small, some of their channels are all alike, and queries are large just there."""
    keys *= 0.01
    keys[..., 8:16] = 0
    queries[..., 8:16] *= 5
    return queries, keys, values


def alike(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> Numbers:
    """All channels of a token's values are the same."""
    return queries, keys, np.broadcast_to(values[..., :1] * 1e-2, values.shape)


def cancelling(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> Numbers:
    """Queries are ones, and keys hundreds in size, whose sums are not."""
    keys = 500 * np.sign(keys)
    keys[..., 1::2] = -0.999 * keys[..., ::2]
    return np.ones_like(queries), keys, values


def null(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> Numbers:
    """Values are positive; but each page has a token of zeros, which weighs 256 times as much."""
    queries, keys, values = positive(np.ones_like(queries), keys, values)
    values[:, :, 0], keys[:, :, 1:] = 0, 0
    keys[:, :, 0] = 8 * np.log(2) / keys.shape[-1] ** 0.5
    return queries, keys, values


KINDS: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], Numbers]] = {
    make.__name__: make
    for make in (
        *(normal, outlier, uniform, small, positive, near, flat),
        *(alike, cancelling, null),
    )
}
