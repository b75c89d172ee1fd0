"""The gated short convolution: a mixer with a depthwise causal convolution over a few tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.models.config import DecoderConfig, MixerSpec
from mpjax.models.convolution import convolve
from mpjax.models.layers import Activations, FusedLinear, Linear, Rounding
from mpjax.models.maps import Fold, LinearMaps
from mpjax.models.recurrent import RecurrentMixer
from mpjax.models.share import Cut, HeadShares, Share, share_size
from mpjax.models.state import SequenceState, StepContext


@dataclasses.dataclass(frozen=True)
class ShortConvSpec(MixerSpec):
    """Spec of the mixer out_proj(c · convolution(b · x)), where in_proj outputs b, c and x.

    channels: of b, c and x. width: kernel size of the convolution, in tokens. bias: whether both
    maps and the convolution have biases.
    """

    kind: ClassVar[str] = "short_conv"
    channels: int
    width: int = 3
    bias: bool = False

    def build(self, config: DecoderConfig, rngs: nnx.Rngs) -> ShortConv:
        """A ShortConv module with random weights."""
        return ShortConv(config, self, rngs)

    def state(self, config: DecoderConfig) -> SequenceState:
        """The last inputs of the convolution, in the model's dtype."""
        return SequenceState(((self.width - 1, self.channels),), config.dtype)

    def linear_maps(self, config: DecoderConfig) -> tuple[LinearMaps, ...]:
        """Two products: b, c and x together (`in_proj`), and `out_proj`."""
        hidden = config.hidden_size
        return (
            LinearMaps("in_proj", ((hidden, self.channels),) * 3, self.bias),
            LinearMaps("out_proj", ((self.channels, hidden),), self.bias),
        )

    def arrays(self, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
        """Shapes of the convolution's weight and bias, by path."""
        found: dict[str, tuple[int, ...]] = {"conv": (self.channels, 1, self.width)}
        return found | ({"conv_bias": (self.channels,)} if self.bias else {})

    def folds(self, config: DecoderConfig) -> tuple[Fold, ...]:
        """The fold of c and `out_proj`: c multiplies each channel."""
        return (Fold("out_proj", "in_proj", 1),)

    def divide(self, count: int, units: Mapping[str, int]) -> ShortConvSpec:
        """The spec with a share of the channels, cut at multiples of `out_proj`'s unit."""
        size = share_size(self.channels, count, units["out_proj"])
        return dataclasses.replace(self, channels=size)

    def cuts(self, config: DecoderConfig, local: ShortConvSpec, share: Share) -> dict[str, Cut]:
        """The share's channels."""
        own = share.run(self.channels, local.channels)
        return {
            "in_proj": Cut(outputs=(own,) * 3),
            "conv": Cut(rows=(own,)),
            "conv_bias": Cut(outputs=(own,)),
            "out_proj": Cut(inputs=own),
        }


class ShortConv(RecurrentMixer):
    """The mixer out_proj(c · convolution(b · x)); see ShortConvSpec."""

    def __init__(self, config: DecoderConfig, spec: ShortConvSpec, rngs: nnx.Rngs):
        into, out = spec.linear_maps(config)
        self.in_proj = FusedLinear.create(into, config.dtype, rngs)
        self.out_proj = Linear.create(out.shapes[0], bias=out.bias, dtype=config.dtype, rngs=rngs)
        shape = spec.arrays(config)["conv"]
        self.conv = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), shape, config.dtype))
        zeros = nnx.Param(jnp.zeros(spec.channels, config.dtype)) if spec.bias else None
        self.conv_bias = nnx.data(zeros)
        self.kept = spec.state(config)

    @property
    def activations(self) -> Rounding:
        """How the input of in_proj is rounded."""
        return self.in_proj.activations

    def divide_norms(self, axis: str, heads: HeadShares) -> None:
        """Changes nothing: the mixer has no norms."""

    def project(self, x: Activations, context: StepContext) -> tuple[jax.Array, ...]:
        """The input b · x of the convolution, and c, which multiplies its result."""
        before, after, inner = self.in_proj(x, context)
        return before * inner, after

    def advance(
        self, inputs: Any, context: StepContext, state: tuple[jax.Array, ...] | None
    ) -> tuple[jax.Array, tuple[jax.Array, ...] | None]:
        """The input of `out_proj`, [..., channels], and the state."""
        read, after = inputs
        y, last = convolve(
            read,
            self.conv.get_value()[:, 0],
            None if state is None else state[0],
            context,
            bias=None if self.conv_bias is None else self.conv_bias.get_value(),
        )
        return after * y, None if last is None else (last,)

    def terms(self, mixed: Activations, context: StepContext) -> jax.Array:
        """Terms [splits, ..., hidden] whose sum is `out_proj` of the result of `mix`."""
        return self.out_proj.terms(mixed, context)

    def inputs(self, x: jax.Array, mixed: jax.Array) -> dict[str, jax.Array]:
        """The input of each linear map, by its path; see `Mixer.inputs`."""
        return {"in_proj": x, "out_proj": mixed}
