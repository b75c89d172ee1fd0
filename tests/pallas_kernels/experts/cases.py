"""Tokens and experts: routings that a product must get right, and what it computes, in numpy."""

from __future__ import annotations

import numpy as np

from mpjax.kernels import Gate

EXPERTS = 6
# The experts of each token, by the name of what is special about them.
ROUTINGS: dict[str, np.ndarray] = {
    "mixed": np.array([[0, 3], [5, 0], [3, 1], [0, 5], [1, 3]], np.int32),
    "all tokens to one": np.full((5, 2), 4, np.int32),
    "the first and the last": np.array([[0, 5]] * 5, np.int32),
    "one token": np.array([[4, 1]], np.int32),
}


def expected(
    x: np.ndarray,
    dense: np.ndarray,
    experts: np.ndarray,
    routing_weights: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    gate: Gate | None = None,
) -> np.ndarray:
    """In float64: products [tokens, k, N] or their weighted sums [tokens, N].

    x: [tokens, K] or [tokens, k, K]. dense: [experts, K, N].
    """
    rows = x if x.ndim == 3 else np.repeat(x[:, None], experts.shape[1], 1)
    found = np.empty((*experts.shape, dense.shape[-1]))
    for expert in np.unique(experts):  # a matrix for each pair would be gigabytes
        has_expert = experts == expert
        found[has_expert] = rows[has_expert] @ dense[expert]
    if bias is not None:
        found += bias[experts]
    if gate is not None:
        inner, up = np.split(found, 2, -1)
        if gate.limit is not None:
            inner = np.minimum(inner, gate.limit)
            up = np.clip(up, -gate.limit, gate.limit) + 1
        found = inner / (1 + np.exp(-gate.alpha * inner)) * up
    return found if routing_weights is None else (found * routing_weights[..., None]).sum(1)
