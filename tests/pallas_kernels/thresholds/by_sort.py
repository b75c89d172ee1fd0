"""Thresholds from their definition, by a sort."""

from __future__ import annotations

import numpy as np


def by_sort(numbers, wanted, weights=None):
    """The largest number of each row for which it and all larger ones weigh `wanted` or more."""
    results = np.full((len(numbers), 1), -np.inf, np.float32)
    for row, values in enumerate(np.asarray(numbers)):
        each = np.ones(len(values), np.int64) if weights is None else np.asarray(weights[row])
        order = np.argsort(-values, kind="stable")
        reached = np.flatnonzero(np.cumsum(each[order], dtype=np.int64) >= wanted[row])
        if wanted[row] > 0 and len(reached):
            results[row] = values[order[reached[0]]]
    return results
