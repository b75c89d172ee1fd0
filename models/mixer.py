"""The interface of mixers, and what those with heads compute from their outputs."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from mpjax.kernels import QuantizedActivations
from mpjax.kernels.invariance import in_row_tiles
from mpjax.models.device_sums import add_over_devices
from mpjax.models.layers import Activations, Rounding
from mpjax.models.share import HeadShares
from mpjax.models.state import StepContext


class Mixer(Protocol):
    """Interface that a DecoderLayer uses of the module that a MixerSpec builds.

    A mixer passes information between tokens. Only the mixer knows the contents of its state.
    """

    @property
    def activations(self) -> Rounding:
        """How the input of the first map is rounded."""

    def mix(self, x: Activations, context: StepContext, state: Any) -> tuple[Activations, Any]:
        """The mixer without its last linear map.

        x: [batch, tokens, hidden], or varlen [tokens, hidden]. state: of the earlier tokens, as
        created by the spec's `state`; None without a cache.

        Returns the input of the last map, [..., channels], and the state with these tokens.
        """

    def terms(self, mixed: Activations, context: StepContext) -> jax.Array:
        """Terms [splits, ..., hidden] whose sum is the output of the last map for `mixed`."""

    def inputs(self, x: jax.Array, mixed: Any) -> dict[str, jax.Array]:
        """The input of each linear map, by its path, from the arguments of `mix` and `terms`."""

    def divide_norms(self, axis: str, heads: HeadShares) -> None:
        """Makes joint norms cover the heads of all devices of a mesh axis."""


def means_of_squares(
    parts: tuple[jax.Array, ...], channels: tuple[int, ...], axis: str
) -> list[jax.Array]:
    """The mean squares, float32 [..., 1], of arrays whose channels are divided among devices.

    parts: [..., this device's channels]. channels: the number of channels on all devices.
    """

    def squares(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)

    sums = jnp.concatenate([in_row_tiles(squares, x) for x in parts], -1)
    totals = jnp.split(add_over_devices(sums, axis), len(parts), -1)
    return [total / count for total, count in zip(totals, channels, strict=True)]


def gated(x: Activations, gate: jax.Array | None) -> Activations:
    """Outputs [..., channels] times the sigmoid of the sum of a gate's terms [splits, ...]."""
    if gate is None:
        return x
    assert isinstance(x, jax.Array)
    factor = jax.nn.sigmoid(gate.astype(jnp.float32).sum(0))
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def joined_heads(x: Activations) -> Activations:
    """Concatenates heads [..., heads, head dim]; quantised outputs are concatenated already."""
    if isinstance(x, QuantizedActivations):
        return x
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])
