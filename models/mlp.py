"""The MLPs of a layer, with and without a gate. Another kind of MLP would be another such file."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.kernels import ActivationFormat, gated, hadamard
from mpjax.models.config import DecoderConfig, MLPSpec
from mpjax.models.device_sums import add_over_devices
from mpjax.models.layers import (
    Activations,
    FusedLinear,
    Linear,
    Projected,
    Projection,
    Rounding,
    as_activations,
    rounded,
)
from mpjax.models.maps import Fold, LinearMaps
from mpjax.models.share import Cut, Share, share_size
from mpjax.models.state import WHOLE, StepContext


class RoutedInputs(NamedTuple):
    """The inputs of the linear maps of experts.

    x: [..., K], one input for all of a token's experts, or [..., k, K], an input for each. experts:
    int32 [..., k], the indices of each token's experts. total: the number of all experts.
    """

    x: jax.Array
    experts: jax.Array
    total: int


Inputs = dict[str, jax.Array | RoutedInputs]  # of linear maps, by path


class MLP(Protocol):
    """Interface that a DecoderLayer uses of the module that an MLPSpec builds."""

    @property
    def activations(self) -> Rounding | Projection:
        """How the input of the first map is rounded, or a Projection of it."""

    def terms(self, x: Activations | Projected, context: StepContext) -> jax.Array:
        """Terms [splits, ..., hidden] whose sum is the MLP's output for x [..., hidden].

        With a cache, activations inside the MLP are rounded to the activation format of the next
        weight. Rounding has no useful gradient, and training has no cache.
        """

    def inputs(self, x: jax.Array) -> Inputs:
        """The input of each linear map, by its path, for an input x [..., hidden] of the module."""


@dataclasses.dataclass(frozen=True)
class GatedMLPSpec(MLPSpec):
    """Spec of the MLP down(activation(gate(x)) · up(x)).

    bias: whether the three maps have biases. activation: `silu`, or `gelu` (its tanh
    approximation). factors: of the outputs of gate and up, biases included; () for none.
    sparsity: the share of a token's gates that the activation gets as 0, if gates are normally
    distributed: a gate g becomes relu(g − μ − σ · Φ⁻¹(sparsity)), with the mean μ and the standard
    deviation σ of the token's gates (Gemma 3n); None for all gates as they are.
    """

    kind: ClassVar[str] = "gated"
    activations: ClassVar[tuple[str, ...]] = ("silu", "gelu")
    factored: ClassVar[int] = 2
    bias: bool = False
    activation: str = "silu"
    factors: tuple[float, ...] = ()
    sparsity: float | None = None

    def why_unsound(self) -> str | None:
        """The reason why a field other than the sizes is invalid, or None."""
        if self.activation not in self.activations:
            expected = " or ".join(self.activations)
            return f"activation is {self.activation!r:.80}: expected {expected}"
        if len(self.factors) not in (0, self.factored):
            return f"factors is {self.factors!r:.80}: expected {self.factored} numbers"
        if self.sparsity is not None and not (self.factored and self.sparsity < 1):
            return f"sparsity is {self.sparsity}: expected less than 1, of gates"
        return self.why_unmixable()

    def mixers(self) -> dict[str, int]:
        """The MLP itself ("") and its channels before `down`."""
        return {"": self.intermediate_size}

    def build(self, config: DecoderConfig, rngs: nnx.Rngs) -> GatedMLP | UngatedMLP:
        """A GatedMLP module with random weights."""
        return GatedMLP(config, self, rngs)

    def linear_maps(self, config: DecoderConfig) -> tuple[LinearMaps, ...]:
        """Two products: gate and up together (`gate_up`), and `down`."""
        hidden, inner = config.hidden_size, self.intermediate_size
        return (
            LinearMaps("gate_up", ((hidden, inner),) * 2, self.bias, factors=self.factors),
            LinearMaps("down", ((inner, hidden),), self.bias),
        )

    def folds(self, config: DecoderConfig) -> tuple[Fold, ...]:
        """The fold of up and down, unless there is a transform; the gate scales each channel."""
        return () if self.hadamard else (Fold("down", "gate_up", 1, is_elementwise=True),)

    def divide(self, count: int, units: Mapping[str, int]) -> GatedMLPSpec:
        """The spec with a share of the intermediate channels, cut at multiples of `down`'s unit.

        Blocks of a Hadamard transform stay whole.
        """
        unit = math.lcm(units["down"], self.hadamard or 1)
        size = share_size(self.intermediate_size, count, unit)
        return dataclasses.replace(self, intermediate_size=size)

    def cuts(self, config: DecoderConfig, local: GatedMLPSpec, share: Share) -> dict[str, Cut]:
        """The share's intermediate channels."""
        inner = share.run(self.intermediate_size, local.intermediate_size)
        return {"gate_up": Cut(outputs=(inner, inner)), "down": Cut(inputs=inner)}


class GatedMLP(nnx.Module):
    """The MLP down(activation(gate(x)) · up(x)), optionally with a transform before `down`."""

    def __init__(self, config: DecoderConfig, spec: GatedMLPSpec, rngs: nnx.Rngs):
        gate_up, down = spec.linear_maps(config)
        self.gate_up = FusedLinear.create(gate_up, config.dtype, rngs)
        self.activation = spec.activation
        self.hadamard, self.gates = spec.hadamard, spec.intermediate_size  # on all devices
        self.axis: str | None = None  # mesh axis that divides them
        share = spec.sparsity
        self.quantile = None if share is None else statistics.NormalDist().inv_cdf(share)
        self.down = Linear.create(down.shapes[0], bias=down.bias, dtype=config.dtype, rngs=rngs)

    @property
    def activations(self) -> Rounding:
        """How the input of gate and up is rounded."""
        return self.gate_up.activations

    def gated(self, x: Activations | Projected, context: StepContext = WHOLE) -> Activations:
        """The input of `down` [..., intermediate_size], rounded for `down` if there is a cache."""
        x = as_activations("GatedMLP: x", x)
        format = self.down.activations if context.is_cached else None
        is_plain = self.hadamard is None and self.quantile is None
        if is_plain and format in (None, ActivationFormat()):
            fused = self.gate_up.gated(x, context, self.activation)
            if fused is not None:
                return fused
        terms = self._sparse(self.gate_up.terms(x, context))
        return gated(terms, self.activation, dtype=x.dtype, format=format, hadamard=self.hadamard)

    def _sparse(self, terms: jax.Array) -> jax.Array:
        """The terms of gate and up, or with a sparsity one term, whose smaller gates are 0."""
        if self.quantile is None:
            return terms
        gate, up = jnp.split(terms.astype(jnp.float32).sum(0), 2, -1)
        sums = jnp.stack([gate.sum(-1), jnp.square(gate).sum(-1)])
        if self.axis is not None:
            sums = add_over_devices(sums, self.axis)
        mean, square = sums / self.gates
        deviation = jnp.sqrt(jnp.maximum(square - jnp.square(mean), 0))
        cutoff = (mean + deviation * self.quantile)[..., None]
        return jnp.concatenate([jax.nn.relu(gate - cutoff), up], -1)[None]

    def terms(self, x: Activations | Projected, context: StepContext) -> jax.Array:
        """Terms [splits, ..., hidden] whose sum is the MLP's output; see `MLP.terms`."""
        return self.down.terms(self.gated(x, context), context)

    def inputs(self, x: jax.Array) -> Inputs:
        """The input of each linear map, by its path, for an input x [..., hidden] of the module."""
        gated = self.gated(x)
        assert isinstance(gated, jax.Array)  # only rounded with a cache
        return {"gate_up": x, "down": gated}

    def __call__(self, x: Activations, context: StepContext = WHOLE) -> jax.Array:
        """Maps x [..., hidden] to the same shape."""
        return self.down(self.gated(x, context), context)


def _xielu(x: jax.Array, positive: jax.Array, negative: jax.Array) -> jax.Array:
    """The activation xIELU (arXiv 2411.13010), with a learned float32 [1] for each sign of x."""
    rising = jax.nn.softplus(positive) * x * x
    falling = (0.5 + jax.nn.softplus(negative)) * (jnp.expm1(jnp.minimum(x, -1e-6)) - x)
    return jnp.where(x > 0, rising, falling) + 0.5 * x


# Name → the activation as a function of x and its learned parameters, and their paths.
ACTIVATIONS: dict[str, tuple[Callable[..., jax.Array], tuple[str, ...]]] = {
    "gelu": (jax.nn.gelu, ()),
    "relu2": (lambda x: jnp.square(jax.nn.relu(x)), ()),
    "xielu": (_xielu, ("alpha_p", "alpha_n")),
}


@dataclasses.dataclass(frozen=True)
class UngatedMLPSpec(GatedMLPSpec):
    """Spec of the MLP down(activation(up(x))).

    bias: whether both maps have biases. activation: `gelu` (its tanh approximation), `relu2` (the
    square of ReLU), or `xielu`, which has two learned parameters.
    """

    kind: ClassVar[str] = "ungated"
    activations: ClassVar[tuple[str, ...]] = tuple(ACTIVATIONS)
    factored: ClassVar[int] = 0
    activation: str = "gelu"

    def build(self, config: DecoderConfig, rngs: nnx.Rngs) -> UngatedMLP:
        """An UngatedMLP module with random weights."""
        return UngatedMLP(config, self, rngs)

    def linear_maps(self, config: DecoderConfig) -> tuple[LinearMaps, ...]:
        """Two products: `up` and `down`."""
        hidden, inner = config.hidden_size, self.intermediate_size
        return (
            LinearMaps("up", ((hidden, inner),), self.bias),
            LinearMaps("down", ((inner, hidden),), self.bias),
        )

    def arrays(self, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
        """Shapes of the activation's learned parameters, by path."""
        return {path: (1,) for path in ACTIVATIONS[self.activation][1]}

    def folds(self, config: DecoderConfig) -> tuple[Fold, ...]:
        """The fold of up and down: channels can only be reordered, as activations aren't linear."""
        fold = Fold("down", "up", is_elementwise=True, is_linear=False)
        return () if self.hadamard else (fold,)

    def cuts(self, config: DecoderConfig, local: GatedMLPSpec, share: Share) -> dict[str, Cut]:
        """The share's intermediate channels."""
        inner = share.run(self.intermediate_size, local.intermediate_size)
        return {"up": Cut(outputs=(inner,)), "down": Cut(inputs=inner)}


class UngatedMLP(nnx.Module):
    """The MLP down(activation(up(x))), optionally with a transform before `down`."""

    def __init__(self, config: DecoderConfig, spec: UngatedMLPSpec, rngs: nnx.Rngs):
        self.up, self.down = (
            Linear.create(maps.shapes[0], bias=maps.bias, dtype=config.dtype, rngs=rngs)
            for maps in spec.linear_maps(config)
        )
        self.activation, self.hadamard = spec.activation, spec.hadamard
        for path, shape in spec.arrays(config).items():
            setattr(self, path, nnx.Param(jnp.zeros(shape, config.dtype)))

    @property
    def activations(self) -> Rounding:
        """How the input of `up` is rounded."""
        return self.up.activations

    def activated(self, x: Activations | Projected, context: StepContext = WHOLE) -> Activations:
        """The input of `down` [..., intermediate_size], rounded for `down` if there is a cache."""
        x = as_activations("UngatedMLP: x", x)
        function, learned = ACTIVATIONS[self.activation]
        numbers = (getattr(self, path).get_value()[0].astype(jnp.float32) for path in learned)
        terms = self.up.terms(x, context)
        found = function(terms.astype(jnp.float32).sum(0), *numbers).astype(x.dtype)
        if self.hadamard is not None:
            found = hadamard(found, self.hadamard, dtype=x.dtype)
        return rounded(found, self.down.activations if context.is_cached else None)

    def terms(self, x: Activations | Projected, context: StepContext) -> jax.Array:
        """Terms [splits, ..., hidden] whose sum is the MLP's output; see `MLP.terms`."""
        return self.down.terms(self.activated(x, context), context)

    def inputs(self, x: jax.Array) -> Inputs:
        """The input of each linear map, by its path, for an input x [..., hidden] of the module."""
        activated = self.activated(x)
        assert isinstance(activated, jax.Array)  # only rounded with a cache
        return {"up": x, "down": activated}

    def __call__(self, x: Activations, context: StepContext = WHOLE) -> jax.Array:
        """Maps x [..., hidden] to the same shape."""
        return self.down(self.activated(x, context), context)
