"""Steps in plain jnp: states are gathered by slot, advanced, and scattered."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mpjax.kernels.recurrent.convolution import causal_convolution
from mpjax.kernels.recurrent.delta import gated_delta_rule
from mpjax.kernels.recurrent.delta_inputs import DeltaInputs
from mpjax.kernels.recurrent.scan import state_space_scan
from mpjax.kernels.recurrent.steps.gates import DeltaGates, ScanGates
from mpjax.kernels.recurrent.steps.rows import StateRows


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
