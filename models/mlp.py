"""The gated MLP of a layer. Another kind of MLP is another file like this one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar, NamedTuple, Protocol

import jax
from flax import nnx

from mpjax.kernels import gated
from mpjax.models.config import DecoderConfig, Fold, LinearMaps, MLPSpec
from mpjax.models.layers import (
    Activations,
    FusedLinear,
    Linear,
    Projected,
    Projection,
    Rounding,
    as_activations,
)
from mpjax.models.share import Cut, Share, share_size


class RoutedInputs(NamedTuple):
    """The inputs of the linear maps of experts.

    x: [..., K], read by all of a token's experts, or [..., k, K], an input for each. experts: int32
    [..., k], the numbers of each token's experts. total: the number of all experts.
    """

    x: jax.Array
    experts: jax.Array
    total: int


Inputs = dict[str, jax.Array | RoutedInputs]  # of linear maps, by their paths


class MLP(Protocol):
    """Interface that a DecoderLayer uses of the module that an MLPSpec builds."""

    @property
    def activations(self) -> Rounding | Projection:
        """How the input of the first map is rounded, or which products are read beside it."""

    def terms(self, x: Activations | Projected, *, quantized: bool) -> jax.Array:
        """Terms [splits, ..., hidden] whose sum is the MLP's output for x [..., hidden].

        quantized: whether activations inside the MLP are rounded to the activation format of the
            next weight. Rounding has no useful gradient, so training passes False.
        """

    def inputs(self, x: jax.Array) -> Inputs:
        """The input of each linear map, by its path, for an input x [..., hidden] of the module."""


@dataclasses.dataclass(frozen=True)
class GatedMLPSpec(MLPSpec):
    """Spec of the MLP down(activation(gate(x)) · up(x)).

    bias: whether the three maps have biases. activation: `silu`, or `gelu` (its tanh
    approximation).
    """

    kind: ClassVar[str] = "gated"
    bias: bool = False
    activation: str = "silu"

    def why_unsound(self) -> str | None:
        """The reason why there is no such activation or transform, or None if there is."""
        if self.activation not in ("silu", "gelu"):
            return f"activation is {self.activation!r:.80}: expected silu or gelu"
        return self.why_unmixable()

    def mixers(self) -> dict[str, int]:
        """The MLP itself."""
        return {"": self.intermediate_size}

    def build(self, config: DecoderConfig, rngs: nnx.Rngs) -> GatedMLP:
        """A GatedMLP module with random weights."""
        return GatedMLP(config, self, rngs)

    def linear_maps(self, config: DecoderConfig) -> tuple[LinearMaps, ...]:
        """Two products: gate and up together (`gate_up`), and `down`."""
        hidden, inner = config.hidden_size, self.intermediate_size
        return (
            LinearMaps("gate_up", ((hidden, inner), (hidden, inner)), self.bias),
            LinearMaps("down", ((inner, hidden),), self.bias),
        )

    def folds(self, config: DecoderConfig) -> tuple[Fold, ...]:
        """From up to down, unless channels are mixed there: the gate multiplies each channel."""
        return () if self.hadamard else (Fold("down", "gate_up", 1, is_elementwise=True),)

    def divide(self, count: int, units: Mapping[str, int]) -> GatedMLPSpec:
        """The spec with a share of the intermediate channels, cut where `down` can be.

        Blocks that a transform mixes stay whole.
        """
        unit = math.lcm(units["down"], self.hadamard or 1)
        size = share_size(self.intermediate_size, count, unit)
        return dataclasses.replace(self, intermediate_size=size)

    def cuts(self, config: DecoderConfig, local: GatedMLPSpec, share: Share) -> dict[str, Cut]:
        """The intermediate channels of a share."""
        inner = share.run(self.intermediate_size, local.intermediate_size)
        return {"gate_up": Cut(outputs=(inner, inner)), "down": Cut(inputs=inner)}


class GatedMLP(nnx.Module):
    """The MLP down(activation(gate(x)) · up(x)), which may mix channels before `down`."""

    def __init__(self, config: DecoderConfig, spec: GatedMLPSpec, rngs: nnx.Rngs):
        gate_up, down = spec.linear_maps(config)
        self.gate_up = FusedLinear.create(gate_up, config.dtype, rngs)
        self.activation = spec.activation
        self.hadamard = spec.hadamard
        self.down = Linear.create(down.shapes[0], bias=down.bias, dtype=config.dtype, rngs=rngs)

    @property
    def activations(self) -> Rounding:
        """How the input of gate and up is rounded."""
        return self.gate_up.activations

    def gated(
        self, x: Activations | Projected, format: Rounding | str | None = None
    ) -> Activations:
        """The input of `down` [..., intermediate_size], rounded to `format`."""
        x = as_activations("GatedMLP: x", x)
        terms = self.gate_up.terms(x)
        return gated(terms, self.activation, dtype=x.dtype, format=format, hadamard=self.hadamard)

    def terms(self, x: Activations | Projected, *, quantized: bool) -> jax.Array:
        """Terms [splits, ..., hidden] whose sum is the MLP's output; see `MLP.terms`."""
        return self.down.terms(self.gated(x, self.down.activations if quantized else None))

    def inputs(self, x: jax.Array) -> Inputs:
        """The input of each linear map, by its path, for an input x [..., hidden] of the module."""
        gated = self.gated(x)
        assert isinstance(gated, jax.Array)  # nothing was said to be quantised
        return {"gate_up": x, "down": gated}

    def __call__(self, x: Activations) -> jax.Array:
        """Maps x [..., hidden] to the same shape."""
        return self.down(self.gated(x))
