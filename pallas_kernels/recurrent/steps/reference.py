"""Steps in plain jnp: states are gathered by slot, advanced, and scattered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.kernels.recurrent.convolution import causal_convolution
from mpjax.kernels.recurrent.delta import gated_delta_rule
from mpjax.kernels.recurrent.delta_inputs import DeltaInputs
from mpjax.kernels.recurrent.scan import state_space_scan
from mpjax.kernels.recurrent.steps.gates import DeltaGates, ScanGates, for_tokens
from mpjax.kernels.recurrent.steps.rows import StateRows


def in_order(
    step: Callable[..., tuple[jax.Array, jax.Array]], x: jax.Array, *others: Any
) -> tuple[jax.Array, jax.Array]:
    """The outputs and states of a step of each row's tokens, one token of one row after another.

    others: the step's parameters, states and rows. XLA fuses nothing else into a token's step, so
    every call runs the same code for it.
    """
    *parameters, states, rows = others

    def run(token: jax.Array, row: jax.Array, is_new: jax.Array, states: jax.Array) -> Any:
        one = StateRows(rows.slots[row][None], is_new[None])
        own = jax.lax.dynamic_slice_in_dim(x, token, 1)
        gates = [
            for_tokens(lambda array: jax.lax.dynamic_slice_in_dim(array, token, 1), each)
            for each in parameters
        ]
        before = one.take(states)
        own, gates, before = jax.lax.optimization_barrier((own, gates, before))
        new = StateRows(jnp.zeros(1, jnp.int32), jnp.zeros(1, bool))
        found, after = jax.lax.optimization_barrier(step(own, *gates, before, new))
        return found[0], one.put(states, after)

    shapes = jax.eval_shape(run, *(jnp.int32(0),) * 2, jnp.bool(0), states)[0]
    outputs = jnp.zeros((len(x), *shapes.shape), shapes.dtype)

    def of_row(row: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        begin, is_new = rows.begins[row], rows.is_new[row]

        def of_token(token: jax.Array, carry: tuple[jax.Array, jax.Array]) -> Any:
            outputs, states = carry
            found, states = run(token, row, is_new & (token == begin), states)
            return outputs.at[token].set(found), states

        return jax.lax.fori_loop(begin, begin + rows.counts[row], of_token, carry)

    # XLA would unroll a short loop of known length.
    count = jax.lax.optimization_barrier(jnp.int32(len(rows.slots)))
    return jax.lax.fori_loop(0, count, of_row, (outputs, states))


def convolution_step(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    states: jax.Array,
    rows: StateRows,
    *,
    silu: bool,
) -> tuple[jax.Array, jax.Array]:
    """The convolution of one token of each row; see the public function."""
    y, after = causal_convolution(
        x[:, None],
        weight,
        rows.take(states),
        bias=bias,
        activation="silu" if silu else None,
    )
    return y[:, 0], rows.put(states, after)


def gated_delta_step(
    channels: jax.Array, gates: DeltaGates, states: jax.Array, rows: StateRows
) -> tuple[jax.Array, jax.Array]:
    """The delta rule of one token of each row; see the public function."""
    heads, size, width = states.shape[1:]
    keys = (channels.shape[-1] - heads * width) // 2
    query, key, value = jnp.split(channels[:, None], (keys, 2 * keys), -1)
    query, key = (x.reshape(len(x), 1, -1, size) for x in (query, key))
    value = value.reshape(len(value), 1, heads, width)
    decay, rate = (gate[:, None] for gate in gates.applied())
    inputs = DeltaInputs(query, key, value, decay, rate)
    outputs, after = gated_delta_rule(inputs, rows.take(states))
    return outputs[:, 0], rows.put(states, after)


def state_space_step(
    channels: jax.Array, gates: ScanGates, states: jax.Array, rows: StateRows
) -> tuple[jax.Array, jax.Array]:
    """Mamba2's step of one token of each row; see the public function."""
    heads, width, size = states.shape[1:]
    inner = heads * width
    shared = (channels.shape[-1] - inner) // 2
    x, b, c = jnp.split(channels[:, None], (inner, inner + shared), -1)
    x = x.reshape(len(x), 1, heads, width)
    b, c = (each.reshape(len(each), 1, -1, size) for each in (b, c))
    steps, rates, skip = gates.applied()
    y, after = state_space_scan(x, steps[:, None], rates, b, c, rows.take(states))
    y = y[:, 0] + skip[None, :, None] * x[:, 0].astype(jnp.float32)
    return y, rows.put(states, after)
