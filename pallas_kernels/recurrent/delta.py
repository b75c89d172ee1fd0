"""The gated delta rule: linear attention whose state decays and is corrected by each token."""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from mpjax.kernels import device
from mpjax.kernels.checks import as_array, require_floats, shown
from mpjax.kernels.gradients import with_gradients_of
from mpjax.kernels.implementation import choose
from mpjax.kernels.recurrent import delta_chunks
from mpjax.kernels.recurrent import delta_reference as reference
from mpjax.kernels.recurrent.chunks import read_flat, read_in_chunks
from mpjax.kernels.recurrent.counts import read_counts
from mpjax.kernels.recurrent.delta_inputs import DeltaInputs, require_inputs

Implementation = Literal["triton", "reference"]


def gated_delta_rule(
    inputs: DeltaInputs,
    state: jax.Array | None = None,
    counts: jax.Array | None = None,
    *,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Applies the gated delta rule to each sequence's tokens, one after another.

    Each value head has a state S [K, V]. With a token's query q and key k, both L2-normalised, and
    q divided by √K, the token's update is

        S ← exp(decay) · S,  S ← S + k · (rate · (value − Sᵀ k))ᵀ,  output = Sᵀ q.

    inputs: of tokens [batch, tokens], padded on the right, or varlen [tokens].
    state: float32 [batch, value heads, K, V]; None for zeros, before a sequence begins.
    counts: int32 [batch], the real tokens of each sequence; None: all. Varlen tokens need counts.

    Returns the outputs float32 [..., value heads, V], which are undefined for padding, and the
    states after each sequence's real tokens. Padding may have any values. A single token is a step,
    and several are chunks of dense products. Everything is as exact as float32, but for kernels of
    chunks, which a GPU has for queries and keys in bfloat16: their products have 16 bits of each
    number. With random keys their errors are below 3e-5 of the largest output or state. With keys
    near one direction and without decay, errors up to 1.5e-4 were measured at rates of 1, and up to
    7.5e-4 at rates of 2. Gradients are those of plain jnp.

    Raises ValueError for shapes and dtypes that don't fit, and for known counts out of range; and
    UnsupportedError, with the reason, if a requested implementation can't run.
    """
    inputs = require_inputs("gated_delta_rule", inputs)
    places = inputs.rate.shape[:-1]
    counts = read_counts("gated_delta_rule", counts, places)
    batch = places[0] if counts is None else len(counts)
    state = _read_state(state, (batch, *inputs.state_shape))
    chosen = choose(
        "gated_delta_rule",
        implementation,
        "triton" if places[-1] > 1 and batch else "reference",
        ("triton", "reference"),
        lambda _: device.why_triton_cannot_run() or delta_chunks.why_not(inputs),
    )
    if chosen == "reference":
        return _plain(inputs, state, counts)
    found: tuple[jax.Array, jax.Array] = with_gradients_of(
        _plain, _by_kernels, inputs, state, counts
    )
    return found


def _plain(
    inputs: DeltaInputs, state: jax.Array, counts: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The rule in plain jnp."""
    grouped = state.reshape(len(state), inputs.key.shape[-2], -1, *state.shape[2:])
    places = inputs.rate.shape[:-1]
    after, outputs = read_in_chunks(reference.read, grouped, inputs, counts, places)
    return outputs.reshape(inputs.value.shape), after.reshape(state.shape)


def _by_kernels(
    inputs: DeltaInputs, state: jax.Array, counts: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The rule by kernels, for heads padded with zero channels to powers of two."""
    places, channels, width = inputs.rate.shape[:-1], *inputs.state_shape[1:]
    sizes = delta_chunks.padded_sizes(inputs)
    decay = _padded(inputs.decay, sizes[0]) if inputs.decays_by_channel else inputs.decay
    query, key = (_padded(x, sizes[0]) for x in (inputs.query, inputs.key))
    padded = DeltaInputs(query, key, _padded(inputs.value, sizes[1]), decay, inputs.rate)
    read = functools.partial(delta_chunks.read, longest=places[-1])
    grown = _padded(_padded(state, sizes[1]).swapaxes(-1, -2), sizes[0]).swapaxes(-1, -2)
    after, outputs = read_flat(read, grown, padded, counts, places)
    if sizes[0] != channels:  # the kernels divide queries by the root of the padded size
        outputs *= (sizes[0] / channels) ** 0.5
    return outputs[..., :width], after[..., :channels, :width]


def _padded(x: jax.Array, size: int) -> jax.Array:
    """The array with zeros up to this size of its last axis."""
    missing = size - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


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
