"""The KL divergence between two models' predictions of the next token."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def divergence(expected: jax.Array, found: jax.Array) -> jax.Array:
    """The Kullback-Leibler divergence Σ p ln(p / q) over the last axis, in nats.

    expected, found: the log-probabilities ln p and ln q, of one shape. If p and q are almost equal,
    rounding can make the sum slightly negative.
    """
    return (jnp.exp(expected) * (expected - found)).sum(-1)
