"""Per-layer embeddings: each layer adds maps of the stream times a token's row (Gemma 3n, 4)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.kernels.cutting import Run
from mpjax.models import tables
from mpjax.models.config import DecoderConfig, SublayerSpec
from mpjax.models.layers import Linear, RMSNorm, rounded
from mpjax.models.maps import LinearMaps
from mpjax.models.mlp import ACTIVATIONS, Inputs
from mpjax.models.share import Cut, Share
from mpjax.models.state import StepContext

NAMES: Mapping[str, str] = {  # in Hugging Face's files, as in `parameters.NAMES`
    "per_layer.table": "model.embed_tokens_per_layer.weight",
    "per_layer.projection": "model.per_layer_model_projection.weight",
    "per_layer.norm.weight": "model.per_layer_projection_norm.weight",
    "per_layer.gate": "model.layers.{layer}.per_layer_input_gate",
    "per_layer.project": "model.layers.{layer}.per_layer_projection",
    "per_layer_post_norm.weight": "model.layers.{layer}.post_per_layer_input_norm.weight",
}


@dataclasses.dataclass(frozen=True)
class WholeSpec(SublayerSpec):
    """Base class of the specs of sublayers that read the stream itself, whole on all devices."""

    @property
    def reads_stream(self) -> bool:
        """See SublayerSpec."""
        return True

    def readers(self, config: DecoderConfig) -> tuple[str, ...]:
        """None: the layer has no norm before the module."""
        return ()

    def divide(self, count: int, units: Mapping[str, int]) -> Self:
        """The same spec."""
        return self

    def cuts(self, config: DecoderConfig, local: Self, share: Share) -> dict[str, Cut]:
        """All outputs of all maps."""
        sizes = {maps.path: maps.shapes[0][1] for maps in self.linear_maps(config)}
        return {path: Cut(outputs=(Run(0, size, size),)) for path, size in sizes.items()}


@dataclasses.dataclass(frozen=True)
class PerLayerSpec(WholeSpec):
    """Spec of the sublayer project(activation(gate(x)) · e), for the layer's input e of each token.

    size: channels of e; see PerLayerInputs. activation: as in UngatedMLPSpec, without parameters.
    """

    kind: ClassVar[str] = "per_layer"
    size: int
    activation: str = "gelu"

    def why_unsound(self) -> str | None:
        """The reason why the activation is unknown, or None."""
        known = [name for name, (_, learned) in ACTIVATIONS.items() if not learned]
        if self.activation in known:
            return None
        return f"activation is {self.activation!r:.80}: expected {' or '.join(known)}"

    def build(self, config: DecoderConfig, rngs: nnx.Rngs) -> PerLayer:
        """A PerLayer module with random weights."""
        return PerLayer(config, self, rngs)

    def linear_maps(self, config: DecoderConfig) -> tuple[LinearMaps, ...]:
        """Two products: `gate` and `project`."""
        hidden = config.hidden_size
        return (
            LinearMaps("gate", ((hidden, self.size),)),
            LinearMaps("project", ((self.size, hidden),)),
        )


class PerLayer(nnx.Module):
    """The sublayer that adds a layer's input of each token; see PerLayerSpec."""

    def __init__(self, config: DecoderConfig, spec: PerLayerSpec, rngs: nnx.Rngs):
        self.gate, self.project = (
            Linear.create(maps.shapes[0], bias=False, dtype=config.dtype, rngs=rngs)
            for maps in spec.linear_maps(config)
        )
        self.activation = spec.activation

    def gated(self, stream: jax.Array, context: StepContext) -> jax.Array:
        """The input of `project` [..., size]. stream: [..., hidden]."""
        assert context.layer_input is not None
        terms = terms_of(self.gate, stream, context)
        function, _ = ACTIVATIONS[self.activation]
        wide = function(terms.astype(jnp.float32).sum(0)) * context.layer_input.astype(jnp.float32)
        return wide.astype(stream.dtype)

    def terms(self, stream: jax.Array, context: StepContext) -> jax.Array:
        """Terms [splits, ..., hidden] whose sum is the module's output."""
        return terms_of(self.project, self.gated(stream, context), context)

    def inputs(self, stream: jax.Array, context: StepContext) -> Inputs:
        """The input of each linear map, by its path."""
        return {"gate": stream, "project": self.gated(stream, context)}


def terms_of(linear: Linear, x: jax.Array, context: StepContext) -> jax.Array:
    """Terms [splits, ..., outputs] of a map of x, which is rounded for it if there is a cache."""
    return linear.terms(rounded(x, linear.activations if context.is_cached else None), context)


class PerLayerInputs(nnx.Module):
    """The inputs of all layers for tokens: (norm(projection · x) + table row) / √2.

    table: [vocabulary, layers · size], whose rows are multiplied by √size. projection: [layers ·
    size, hidden], of the embedding x, times hidden^−½. norm: over the channels of one layer. Token
    ids beyond the table have the row of id 0.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        table, projection, [self.size] = array_shapes(config).values()
        self.table, self.projection = (
            tables.create(False, shape, config.dtype, rngs) for shape in (table, projection)
        )
        self.rows, self.dtype = table[0], config.dtype
        self.norm = RMSNorm.of(config, self.size)

    def __call__(self, tokens: jax.Array, embedded: jax.Array) -> jax.Array:
        """The inputs [..., layers, size] for token ids int [...] and embeddings [..., hidden]."""
        shape = *tokens.shape, -1, self.size
        scale = jnp.asarray(self.size**0.5, self.dtype)
        known = jnp.where(tokens < self.rows, tokens, 0)
        looked_up = tables.look_up(self.table, known, self.dtype).reshape(shape) * scale
        projected = tables.logits(self.projection, embedded) * embedded.shape[-1] ** -0.5
        normed = self.norm(projected.astype(self.dtype).reshape(shape))
        return ((normed + looked_up) * jnp.asarray(2**-0.5, self.dtype)).astype(self.dtype)


def array_shapes(config: DecoderConfig) -> dict[str, Any]:
    """Shapes of the parameters of the decoder's PerLayerInputs, by path; {} without them."""
    if (spec := config.in_all_layers("per_layer")) is None:
        return {}
    channels, rows = config.depth * spec.size, config.per_layer_vocab or config.vocab_size
    return {
        "per_layer.table": (rows, channels),
        "per_layer.projection": (channels, config.hidden_size),
        "per_layer.norm.weight": (spec.size,),
    }


def contexts(
    config: DecoderConfig, context: StepContext, inputs: jax.Array | None
) -> list[StepContext]:
    """The context of each layer. inputs: [..., layers, size]; None without per-layer embeddings."""
    return [
        dataclasses.replace(
            context,
            layer_input=None if inputs is None else inputs[..., index, :],
            keeps=index in config.sources,
            routes=context.routes and context.routes.get(index),
        )
        for index in range(config.depth)
    ]
