"""The causal convolution inside recurrent mixers, on the fixed-size states of all sequences."""

from __future__ import annotations

from typing import Literal

import jax

from mpjax.kernels import causal_convolution, convolution_step
from mpjax.models.state import StepContext


def is_step(x: jax.Array) -> bool:
    """Whether x has one token of each sequence, [batch, 1, channels]."""
    return x.ndim == 3 and x.shape[1] == 1


def convolve(
    x: jax.Array,
    weight: jax.Array,
    states: jax.Array | None,
    context: StepContext,
    *,
    bias: jax.Array | None = None,
    activation: Literal["silu"] | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """The causal convolution of a step's tokens, and the states with these tokens.

    x: [batch, tokens, channels], or varlen [tokens, channels]. states: of all sequences, [...,
        width − 1, channels]; None without a cache.
    """
    if states is None:
        y, _ = causal_convolution(x, weight, None, context.counts, bias=bias, activation=activation)
        return y, None
    rows = context.rows(states)
    if is_step(x):
        y, states = convolution_step(
            x[:, 0], weight, states, rows, bias=bias, activation=activation
        )
        return y[:, None], states
    y, after = causal_convolution(
        x, weight, rows.take(states), context.counts, bias=bias, activation=activation
    )
    return y, rows.put(states, after)
