"""The gated delta rule as one operation: a linear attention whose state forgets and corrects."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mpjax.kernels.checks import as_array, require_floats, shown
from mpjax.kernels.recurrent import delta_reference as reference
from mpjax.kernels.recurrent.chunks import read_in_chunks
from mpjax.kernels.recurrent.counts import read_counts
from mpjax.kernels.recurrent.delta_inputs import DeltaInputs, require_inputs


def gated_delta_rule(
    inputs: DeltaInputs,
    state: jax.Array | None = None,
    counts: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Lets tokens read and write the states of their sequences, one after another.

    Each value head has a state S [K, V]. A token with the query q and key k, both divided by their
    length, and q by √K, does

        S ← exp(decay) · S,  S ← S + k · (rate · (value − Sᵀ k))ᵀ,  output = Sᵀ q.

    inputs: of tokens [batch, tokens], padded on the right, or varlen [tokens].
    state: float32 [batch, value heads, K, V]; None for zeros, before a sequence begins.
    counts: int32 [batch], the real tokens of each sequence; None: all. Varlen tokens need them.

    Returns the outputs float32 [..., value heads, V], which have no meaning for padding, and the
    states after each sequence's real tokens. Padding may hold any numbers. Everything is computed
    in float32, a single token as a step and several in chunks of dense products. Differentiable, in
    plain jnp.

    Raises ValueError for shapes and dtypes that don't fit, and where their values are known for
    counts out of range.
    """
    inputs = require_inputs("gated_delta_rule", inputs)
    places = inputs.decay.shape[:-1]
    counts = read_counts("gated_delta_rule", counts, places)
    batch = places[0] if counts is None else len(counts)
    state = _read_state(state, (batch, *inputs.state_shape))
    grouped = state.reshape(batch, inputs.key.shape[-2], -1, *state.shape[2:])
    after, outputs = read_in_chunks(reference.read, grouped, inputs, counts, places)
    return outputs.reshape(inputs.value.shape), after.reshape(state.shape)


def _read_state(state: Any, shape: tuple[int, ...]) -> jax.Array:
    """The state in float32, zeros for None. Raises ValueError for another shape."""
    if state is None:
        return jnp.zeros(shape)
    state = as_array("gated_delta_rule: state", state)
    require_floats("gated_delta_rule", state=state)
    if state.shape != shape:
        raise ValueError(
            f"gated_delta_rule: state is {shown(state)}: expected [batch, value heads, K, V], "
            f"which is {shape}"
        )
    return state.astype(jnp.float32)
