"""Recurrences token by token, for batch invariance: chunks depend on how a prompt is cut."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.kernels.gradients import with_gradients_of
from mpjax.kernels.recurrent.steps.gates import for_tokens
from mpjax.models.state import StepContext

Found = tuple[jax.Array, jax.Array]  # outputs and states


def in_order(
    step: Callable[..., Found],
    usual: Callable[..., Found],
    x: jax.Array,
    parameters: tuple[Any, ...],
    states: jax.Array,
    context: StepContext,
) -> Found:
    """The outputs of each sequence's tokens, one after another, and the states after them.

    step: (x [tokens, ...], *parameters, states, rows) → outputs [tokens, ...] and states, such as
        `gated_delta_step`.
    usual: (x, parameters, states, context) → the same but for rounding, with its derivatives.
    x: [batch, tokens, ...], or varlen [tokens, ...]; arrays of gates have the same first axes.
    states: of all sequences; without a cache zeros.

    Outputs of padding are zeros.
    """
    run = functools.partial(_run, step)
    found: Found = with_gradients_of(usual, run, x, parameters, states, context)
    return found


def _run(
    step: Callable[..., Found],
    x: jax.Array,
    parameters: tuple[Any, ...],
    states: jax.Array,
    context: StepContext,
) -> Found:
    places = x.shape[:-1]

    def flat(array: jax.Array) -> jax.Array:
        return array.reshape(-1, *array.shape[len(places) :])

    *batch, tokens = places
    if batch:
        begins = jnp.arange(batch[0], dtype=jnp.int32) * tokens
        counts = jnp.full(batch, tokens) if context.counts is None else context.counts
    else:
        assert context.counts is not None
        counts = context.counts
        begins = jnp.cumsum(counts) - counts
    rows = dataclasses.replace(context.rows(states), begins=begins, counts=counts)
    gates = [for_tokens(flat, each) for each in parameters]
    outputs, states = step(flat(x), *gates, states, rows)
    is_real = jax.lax.expand_dims(context.places(places)[1], range(1, outputs.ndim))
    outputs = jnp.where(is_real, outputs, jnp.zeros_like(outputs))
    return outputs.reshape(*places, *outputs.shape[1:]), states
