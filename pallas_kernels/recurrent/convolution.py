"""The depthwise causal convolution, with its state, for padded and varlen tokens."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from mpjax.kernels.checks import (
    as_arrays,
    optional_array,
    require_floats,
    shown,
)
from mpjax.kernels.kv_cache.varlen import tokens_of
from mpjax.kernels.recurrent.counts import read_counts


def causal_convolution(
    x: jax.Array,
    weight: jax.Array,
    state: jax.Array | None = None,
    counts: jax.Array | None = None,
    *,
    bias: jax.Array | None = None,
    activation: Literal["silu"] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Depthwise causal convolution over tokens: y[t] = Σ weight[j] · x[t − width + 1 + j].

    x: [batch, tokens, channels], padded on the right, or varlen [tokens, channels].
    weight: [channels, width]; the last tap multiplies the newest token.
    state: [batch, width − 1, channels], the inputs before the first token, the newest last; None
        for zeros, before a sequence begins.
    counts: int32 [batch], the real tokens of each sequence; None: all. Varlen x needs counts.
    bias: [channels], added to each sum. activation: of the result, `silu` or None.

    Returns y in the shape and dtype of x, computed in float32, and the state after each sequence's
    real tokens, in the dtype of the state, or of x without one. Padding may have any values: they
    affect neither real tokens nor the state, nor gradients. Differentiable, in plain jnp.

    Raises ValueError for shapes and dtypes that don't fit, and for known counts out of range.
    """
    x, weight = as_arrays("causal_convolution", x=x, weight=weight)
    state = optional_array("causal_convolution: state", state)
    bias = optional_array("causal_convolution: bias", bias)
    _require_floats(x=x, weight=weight, state=state, bias=bias)
    if activation is not None and str(activation) != "silu":
        raise ValueError(
            f"causal_convolution: activation is {shown(activation)}: expected 'silu' or None"
        )
    if x.ndim not in (2, 3):
        raise ValueError(
            f"causal_convolution: x is {shown(x)}: expected [batch, tokens, channels], or varlen "
            "[tokens, channels]"
        )
    counts = read_counts("causal_convolution", counts, x.shape[:-1])
    batch = len(x) if counts is None else len(counts)
    _require_shapes(x, weight, state, bias, batch)
    if state is None:
        state = jnp.zeros((batch, weight.shape[1] - 1, x.shape[-1]), x.dtype)
    if x.ndim == 2:
        assert counts is not None
        taps, after = _varlen(x, state, counts)
    else:
        taps, after = _padded(x, state, counts)
    wide = weight.astype(jnp.float32)
    y = sum(
        tap.astype(jnp.float32) * jax.lax.broadcast_to_rank(wide[:, number], x.ndim)
        for number, tap in enumerate(taps)
    )
    assert isinstance(y, jax.Array)
    if bias is not None:
        y += jax.lax.broadcast_to_rank(bias.astype(jnp.float32), x.ndim)
    return (y if activation is None else jax.nn.silu(y)).astype(x.dtype), after


def _padded(
    x: jax.Array, state: jax.Array, counts: jax.Array | None
) -> tuple[list[jax.Array], jax.Array]:
    """The inputs of each tap, in the shape of x, and the next state."""
    tokens, before = x.shape[1], state.shape[1]
    if counts is not None:
        is_real = jnp.arange(tokens)[None] < counts[:, None]
        x = jnp.where(is_real[..., None], x, jnp.zeros_like(x))
    known = jnp.concatenate([state.astype(x.dtype), x], 1)
    taps = [known[:, number : number + tokens] for number in range(before + 1)]
    kept = jnp.concatenate([state, x.astype(state.dtype)], 1)
    if counts is None:
        return taps, kept[:, tokens:]
    last = counts[:, None] + jnp.arange(before)[None]
    return taps, jnp.take_along_axis(kept, last[..., None], axis=1)


def _varlen(x: jax.Array, state: jax.Array, counts: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """The inputs of each tap, and the next state, for varlen tokens."""
    found, before = tokens_of(counts, len(x)), state.shape[1]
    x = jnp.where(found.is_real[:, None], x, jnp.zeros_like(x))
    earlier = state.astype(x.dtype)
    taps = []
    for back in range(before, 0, -1):
        shifted = jnp.concatenate([jnp.zeros_like(x[:back]), x[:-back]])[: len(x)]
        old = earlier[found.sequence, jnp.clip(before + found.number - back, 0, before - 1)]
        taps.append(jnp.where((found.number >= back)[:, None], shifted, old))
    place = counts[:, None] - before + jnp.arange(before)[None]  # positions in each sequence
    begins = jnp.cumsum(counts) - counts
    new = x[jnp.clip(begins[:, None] + place, 0, len(x) - 1)].astype(state.dtype)
    old = jnp.take_along_axis(state, jnp.clip(place + before, 0, before - 1)[..., None], axis=1)
    return [*taps, x], jnp.where((place >= 0)[..., None], new, old)


def _require_floats(**arrays: jax.Array | None) -> None:
    given = {name: array for name, array in arrays.items() if array is not None}
    require_floats("causal_convolution", **given)


def _require_shapes(
    x: jax.Array, weight: jax.Array, state: jax.Array | None, bias: jax.Array | None, batch: int
) -> None:
    """Raises ValueError for shapes that don't fit together."""
    channels = x.shape[-1]
    if weight.ndim != 2 or weight.shape[0] != channels or weight.shape[1] < 1:
        raise ValueError(
            f"causal_convolution: weight is {shown(weight)}: expected [channels, width] for the "
            f"{channels} channels of x"
        )
    expected = batch, weight.shape[1] - 1, channels
    if state is not None and state.shape != expected:
        raise ValueError(
            f"causal_convolution: state is {shown(state)}: expected [batch, width − 1, channels], "
            f"which is {expected}"
        )
    if bias is not None and bias.shape != (channels,):
        raise ValueError(
            f"causal_convolution: bias is {shown(bias)}: expected [channels], {channels} of them"
        )
