"""The causal convolution inside recurrent mixers, on the fixed-size states of all sequences."""

from __future__ import annotations

import functools
from typing import Literal

import jax

from mpjax.kernels import StateRows, causal_convolution, convolution_step
from mpjax.kernels.invariance import is_batch_invariant
from mpjax.models.in_order import in_order
from mpjax.models.state import StepContext

Activation = Literal["silu"] | None
Parameters = tuple[jax.Array, jax.Array | None]  # weight and bias


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
    activation: Activation = None,
) -> tuple[jax.Array, jax.Array | None]:
    """The causal convolution of a step's tokens, and the states with these tokens.

    x: [batch, tokens, channels], or varlen [tokens, channels]. states: of all sequences, [...,
        width − 1, channels]; None without a cache.
    """
    parameters = weight, bias
    if states is None:
        y, _ = causal_convolution(x, weight, None, context.counts, bias=bias, activation=activation)
        return y, None
    whole = functools.partial(_whole, activation)
    if is_batch_invariant():
        one = functools.partial(_one, activation)
        return in_order(one, whole, x, parameters, states, context)
    if is_step(x):
        y, states = _one(activation, x[:, 0], *parameters, states, context.rows(states))
        return y[:, None], states
    return whole(x, parameters, states, context)


def _one(
    activation: Activation,
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    states: jax.Array,
    rows: StateRows,
) -> tuple[jax.Array, jax.Array]:
    return convolution_step(x, weight, states, rows, bias=bias, activation=activation)


def _whole(
    activation: Activation,
    x: jax.Array,
    parameters: Parameters,
    states: jax.Array,
    context: StepContext,
) -> tuple[jax.Array, jax.Array]:
    weight, bias = parameters
    rows = context.rows(states)
    y, after = causal_convolution(
        x, weight, rows.take(states), context.counts, bias=bias, activation=activation
    )
    return y, rows.put(states, after)
