"""Kimi Delta Attention: Gated DeltaNet with a decay for each key channel, and low-rank gates.

Source: Kimi Linear (arXiv 2510.26692).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.kernels.cutting import Run
from mpjax.models.config import DecoderConfig
from mpjax.models.gated_delta import GatedDelta, GatedDeltaSpec
from mpjax.models.layers import Activations, FusedLinear, Linear, Rounding, as_activations, shared
from mpjax.models.maps import LinearMaps
from mpjax.models.share import Cut, Share
from mpjax.models.state import StepContext


@dataclasses.dataclass(frozen=True)
class KimiDeltaSpec(GatedDeltaSpec):
    """Spec of Kimi Delta Attention; fields are as in GatedDeltaSpec.

    Decays and gates are low-rank: maps to the channels of one head, then to those of all heads.
    """

    kind: ClassVar[str] = "kimi_delta"
    split_conv: bool = True

    def build(self, config: DecoderConfig, rngs: nnx.Rngs) -> KimiDelta:
        """A KimiDelta module with random weights."""
        return KimiDelta(config, self, rngs)

    def linear_maps(self, config: DecoderConfig) -> tuple[LinearMaps, ...]:
        """Query, key and value (`qkv`); low-rank decay and gate, and β (`low`); and their results.

        `decays` and `gates` are the second maps of decays and gates, `out` the output map.
        """
        hidden, heads = config.hidden_size, self.value_heads
        keys, values = self.key_heads * self.key_dim, heads * self.value_dim
        low = self.key_dim, self.value_dim, heads
        return (
            LinearMaps("qkv", tuple((hidden, size) for size in (keys, keys, values))),
            LinearMaps("low", tuple((hidden, size) for size in low), is_precise=True),
            LinearMaps("decays", ((self.key_dim, heads * self.key_dim),), is_precise=True),
            LinearMaps("gates", ((self.value_dim, values),)),
            LinearMaps("out", ((values, hidden),)),
        )

    def arrays(self, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
        """Shapes of GatedDeltaSpec's arrays, with an offset of each channel's decay."""
        decays = {"decay": (self.value_heads, 1), "shift": (self.value_heads * self.key_dim,)}
        return super().arrays(config) | decays

    def readers(self, config: DecoderConfig) -> tuple[str, ...]:
        """The two maps of the module's input."""
        return "qkv", "low"

    def working_bytes(self, config: DecoderConfig, tokens: int) -> int:
        """Peak bytes of GatedDeltaSpec, and in float32 decays and what kernels make of them."""
        decays = 5 * self.value_heads * self.key_dim
        return super().working_bytes(config, tokens) + 4 * tokens * decays

    def cuts(self, config: DecoderConfig, local: GatedDeltaSpec, share: Share) -> dict[str, Cut]:
        """The outputs and arrays of a share's heads, and the matching inputs of the output map."""
        found = super().cuts(config, local, share)
        query, key, value, _ = found.pop("qkvz").outputs or ()
        rate, _ = found.pop("ba").outputs or ()
        first, second = (Run(0, size, size) for size in (self.key_dim, self.value_dim))
        decays = rate.times(self.key_dim)
        return found | {
            "qkv": Cut(outputs=(query, key, value)),
            "low": Cut(outputs=(first, second, rate)),
            "decays": Cut(outputs=(decays,)),
            "gates": Cut(outputs=(value,)),
            "decay": Cut(rows=(rate,)),
            "shift": Cut(outputs=(decays,)),
        }


class KimiDelta(GatedDelta):
    """The mixer of Kimi Delta Attention: convolution, delta rule, and a gated norm."""

    qkv: FusedLinear
    low: FusedLinear
    decays: Linear
    gates: Linear

    @property
    def activations(self) -> Rounding:
        """How the input of both maps is rounded."""
        return shared([self.qkv.activations, self.low.activations])

    def inputs(self, x: jax.Array, mixed: jax.Array) -> dict[str, jax.Array]:
        """The input of each linear map, by its path; see `Mixer.inputs`."""
        decay, gate, _ = self.low(x)
        return {"qkv": x, "low": x, "decays": decay, "gates": gate, "out": mixed}

    @property
    def decay_parameters(self) -> tuple[jax.Array, jax.Array]:
        """The rates of heads' decays, and the offsets of channels', as DeltaGates takes them."""
        heads = self.spec.value_heads
        return self.decay.get_value()[:, 0], self.shift.get_value().reshape(heads, -1)

    def opening(self, gate: jax.Array) -> jax.Array:
        """The factor of the normed outputs, for gates in float32."""
        return jax.nn.sigmoid(gate)

    def project(self, x: Activations, context: StepContext) -> tuple[jax.Array, ...]:
        """The convolution's input [..., channels], gates, β and decays.

        x: [batch, tokens, hidden], or varlen [tokens, hidden].

        Gates and decays are [..., value heads, channels], β [..., value heads], all before their
        activations.
        """
        x = as_activations("KimiDelta: x", x)
        channels = jnp.concatenate(self.qkv(x, context), -1)
        decay, gate, rate = self.low(x, context)
        decay, gate = self.decays(decay, context), self.gates(gate, context)
        places, heads = x.shape[:-1], self.spec.value_heads
        return channels, gate.reshape(*places, heads, -1), rate, decay.reshape(*places, heads, -1)
