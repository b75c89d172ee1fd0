"""A layer of a decoder: mixer and MLP with their norms, and the residual stream."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.kernels import ActivationFormat
from mpjax.kernels.optimized_once import optimized_once
from mpjax.kernels.plans import conditions as plan_conditions
from mpjax.models.config import DecoderConfig, LayerSpec
from mpjax.models.device_sums import summing_by
from mpjax.models.layers import Projection, RMSNorm, Rounding, joined_terms, rounded
from mpjax.models.mixer import Mixer
from mpjax.models.mlp import MLP, GatedMLP, Inputs
from mpjax.models.per_layer import PerLayer
from mpjax.models.share import HeadShares
from mpjax.models.state import StepContext
from mpjax.models.streams import Streams
from mpjax.models.watch import Watch


class DecoderLayer(nnx.Module):
    """A mixer and an MLP, each added to the residual stream, with norms before or after them.

    attention: the mixer, or None. mlp: the MLP, or None. per_layer: the sublayer of per-layer
    embeddings, or None. streams: the layer's part in several residual streams; None for a single
    one. scale: [1], by which the layer multiplies the residual stream, or None.
    """

    def __init__(self, config: DecoderConfig, spec: LayerSpec, rngs: nnx.Rngs):
        norm = functools.partial(RMSNorm.of, config, config.hidden_size)
        pre, halves = spec.pre_norms.values(), spec.halves
        post = [*halves] if spec.has_post_norms else []
        self.shares_norm = spec.norms == "shared"
        self.attention_norm = norm() if "attention_norm" in pre else None
        self.attention = halves["attention"].build(config, rngs) if spec.attention else None
        own = getattr(spec.attention, "norm_eps", None)  # of a head with settings of its own
        self.mlp_norm = norm(own) if "mlp_norm" in pre else None
        self.mlp = halves["mlp"].build(config, rngs) if spec.mlp else None
        epsilon = config.post_norm_eps
        self.attention_post_norm = norm(epsilon) if "attention" in post else None
        self.mlp_post_norm = norm(epsilon) if "mlp" in post else None
        self.per_layer: PerLayer | None = nnx.data(None)
        if spec.per_layer is not None:
            self.per_layer = halves["per_layer"].build(config, rngs)
        self.per_layer_post_norm = norm() if "per_layer" in post else None
        self.streams: Streams | None = nnx.data(None)
        if spec.streams is not None:
            self.streams = halves["streams"].build(config, rngs)
        self.streams_post_norm = norm() if "streams" in post else None
        self.scale = nnx.data(nnx.Param(jnp.ones(1, config.dtype)) if spec.scaled else None)

    def divide_sums(self, axis: str, heads: HeadShares, spec: LayerSpec) -> None:
        """Makes joint norms, and statistics of gates, cover the channels of all devices of an axis.

        heads: of the whole model. spec: of the whole layer.
        """
        if self.attention is not None:
            self.attention.divide_norms(axis, heads)
        if isinstance(self.mlp, GatedMLP) and spec.mlp is not None:
            self.mlp.axis, self.mlp.gates = axis, spec.mlp.intermediate_size

    def __call__(
        self, terms: jax.Array, residual: jax.Array | None, context: StepContext, state: Any
    ) -> tuple[jax.Array, jax.Array | None, Any]:
        """Runs the layer; returns the next terms, the next residual stream, and the state.

        terms: [splits, batch, tokens, hidden], partial sums of the previous layer's output; the
        norm adds them to the residual stream, which saves a second pass over the stream.
        residual: [batch, tokens, hidden], or None before the first layer. If there are several
        streams, they are `terms`, and there is no residual stream.
        context, state: as for `Mixer.mix`. With a cache no gradient is needed, so norms also round
        activations to the 8-bit format of the next weight.
        """
        mixer: Mixer | None = self.attention
        predicted = None
        if self.streams is not None:
            predicted = self.streams.predicted(terms)
            terms = predicted[self.streams.active][None]
        if mixer is None:
            found = _after_mixer(plan_conditions(), self, terms, None, residual, context)
            return *found, state
        format = mixer.activations if context.is_cached else None
        is_plain = isinstance(format, ActivationFormat)
        mlp: MLP | None = self.mlp
        reads_alike = is_plain and mlp is not None and format == mlp.activations
        if predicted is not None or (self.shares_norm and not reads_alike):
            format = None  # each sublayer rounds x for its own weights
        residual, x = _read(self.attention_norm, terms, residual, format)
        mixed, state = mixer.mix(x, context, state)
        shared = None if predicted is None and not self.shares_norm else x
        terms, residual = _after_mixer(plan_conditions(), self, mixed, shared, residual, context)
        if predicted is not None:
            return _corrected(self, predicted, stream_of(terms, residual), context), None, state
        return terms, residual, state

    def after_norm(
        self, x: Any, residual: jax.Array, context: StepContext, state: Any
    ) -> tuple[jax.Array, jax.Array, Any]:
        """The results of a call whose mixer reads x instead of the normed stream."""
        mixer: Mixer | None = self.attention
        assert mixer is not None
        mixed, state = mixer.mix(x, context, state)
        found = _after_mixer(plan_conditions(), self, mixed, None, residual, context)
        return *found, state

    def watched(
        self, number: int, stream: jax.Array, context: StepContext, state: Any, watch: Watch
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Runs the layer in parts that `watch` captures or changes; the result is that of a call.

        number: the layer's index. stream: the residual stream that enters it.
        """
        mixer: Mixer | None = self.attention
        mlp: MLP | None = self.mlp

        def output(point: str, norm: RMSNorm | None, terms: jax.Array) -> jax.Array:
            """The output of a sublayer, as a single term."""
            wide = _written(norm, terms).astype(jnp.float32).sum(0)
            if not watch.touches(number, point):
                return wide[None]
            return watch.see(point, number, wide.astype(stream.dtype)).astype(jnp.float32)[None]

        terms, x = jnp.zeros_like(stream, jnp.float32)[None], stream
        if mixer is not None:
            format = mixer.activations if context.is_cached and not self.shares_norm else None
            _, x = _read(self.attention_norm, stream[None], None, format)
            mixed, state = mixer.mix(x, context, state)
            terms = mixer.terms(mixed, context)
            terms = output("attention", self.attention_post_norm, terms)
        if mlp is None:
            return *_finished(self, terms, stream, context), state
        before = terms
        if not self.shares_norm:
            reading = mlp.activations if context.is_cached else None
            stream, x = _read(self.mlp_norm, terms, stream, reading)
        if watch.captures("router", number):
            watch.see("router", number, mlp.route(x)[0])  # type: ignore[attr-defined]
        found = output("mlp", self.mlp_post_norm, mlp.terms(x, context))
        terms = jnp.concatenate([before, found]) if self.shares_norm else found
        return *_finished(self, terms, stream, context), state

    def inputs(self, hidden: jax.Array, angles: dict[str, jax.Array]) -> tuple[jax.Array, Inputs]:
        """The next residual stream, and the input of each linear map, by path.

        hidden: the residual stream [batch, tokens, hidden], of whole sequences from position 0.
        angles: as in StepContext.
        """
        mixer: Mixer | None = self.attention
        mlp: MLP | None = self.mlp
        context, found = StepContext(angles), Inputs()
        x = hidden if self.attention_norm is None else self.attention_norm(hidden)
        if mixer is not None:
            mixed, _ = mixer.mix(x, context, None)
            found |= {f"attention.{path}": read for path, read in mixer.inputs(x, mixed).items()}
            terms = _written(self.attention_post_norm, mixer.terms(mixed, context))
            hidden = hidden + terms.sum(0).astype(hidden.dtype)
        if mlp is None:
            return _times(hidden, self.scale), found
        if not self.shares_norm:
            x = hidden if self.mlp_norm is None else self.mlp_norm(hidden)
        found |= {f"mlp.{path}": read for path, read in mlp.inputs(x).items()}
        terms = _written(self.mlp_post_norm, mlp.terms(x, context))
        return _times(hidden + terms.sum(0).astype(hidden.dtype), self.scale), found


def _times(x: jax.Array, scale: nnx.Param[jax.Array] | None) -> jax.Array:
    """X times a layer's scale [1], if it has one, in the dtype of x."""
    if scale is None:
        return x
    return (x.astype(jnp.float32) * scale.get_value().astype(jnp.float32)[0]).astype(x.dtype)


def _corrected(
    layer: DecoderLayer, predicted: jax.Array, stream: jax.Array, context: StepContext
) -> jax.Array:
    """All streams after a layer. stream: the active one, as mixer and MLP wrote it."""
    assert layer.streams is not None
    found = layer.streams.corrected(predicted, stream)
    if layer.per_layer is not None:
        terms = layer.per_layer.terms(layer.streams.read(found), context)
        added = _written(layer.per_layer_post_norm, terms).sum(0).astype(found.dtype)
        found = jnp.concatenate([found[:1], found[1:] + added[None]])
    return found


def _finished(
    layer: DecoderLayer, terms: jax.Array, residual: jax.Array, context: StepContext
) -> tuple[jax.Array, jax.Array]:
    """The next terms and stream after mixer and MLP: with the third sublayer and the scale."""
    if layer.per_layer is not None and layer.streams is None:
        residual = stream_of(terms, residual)
        terms = _written(layer.per_layer_post_norm, layer.per_layer.terms(residual, context))
    return _times(terms, layer.scale), _times(residual, layer.scale)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def apply(
    plans: Hashable, layer: DecoderLayer, *arguments: Any
) -> tuple[jax.Array, jax.Array | None, Any]:
    """Applies a layer. JAX traces and lowers equal layers once: with kernels, that is slow.

    plans: the conditions that plans depend on besides the arguments, such as the device and the
    tables of plans; `jit` traces again when they change.
    """
    context: StepContext = arguments[2]
    with summing_by(context.inbox):
        return layer(*arguments)


def _read(
    norm: RMSNorm | None,
    terms: jax.Array,
    residual: jax.Array | None,
    format: Rounding | Projection | None,
) -> tuple[jax.Array, Any]:
    """Adds terms to the residual stream; returns the stream, and the sublayer's rounded input."""
    if norm is not None:
        if isinstance(format, Projection):
            return norm.project(terms, residual, format)
        return norm.add(terms, residual, format)
    wide = terms.astype(jnp.float32).sum(0)
    if residual is not None:
        wide += residual.astype(jnp.float32)
        terms = residual  # for the stream's dtype
    stream = wide.astype(terms.dtype)
    return stream, rounded(stream, None if isinstance(format, Projection) else format)


def stream_of(terms: jax.Array, residual: jax.Array | None) -> jax.Array:
    """The residual stream with a layer's terms added."""
    stream, _ = _read(None, terms, residual, None)
    return stream


def _written(norm: RMSNorm | None, terms: jax.Array) -> jax.Array:
    """The terms that a sublayer adds to the residual stream: its output, or the post-norm of it."""
    if norm is None:
        return terms
    _, normed = norm.add(terms, None, None)
    assert isinstance(normed, jax.Array)
    return normed[None]


@optimized_once("plans")
def _after_mixer(
    plans: Hashable,
    layer: DecoderLayer,
    mixed: Any,
    shared: Any,
    residual: jax.Array,
    context: StepContext,
) -> tuple[jax.Array, jax.Array]:
    """The part of a layer after its mixer: the next terms and residual stream.

    plans: the conditions that plans depend on. mixed: the result of `Mixer.mix`, or in a layer
    without a mixer the layer's input terms. shared: the mixer's input if another sublayer reads it,
    else None. residual, context: as for the layer.
    """
    mixer: Mixer | None = layer.attention
    mlp: MLP | None = layer.mlp
    if shared is not None and layer.streams is None:
        assert mixer is not None
        assert mlp is not None
        halves = mixer.terms(mixed, context), mlp.terms(shared, context)
        return _finished(layer, joined_terms(*halves), residual, context)
    terms = mixed
    before: jax.Array | None = residual
    if mixer is not None:
        terms = _written(layer.attention_post_norm, mixer.terms(mixed, context))
    if layer.streams is not None:
        beside = _written(layer.streams_post_norm, layer.streams.terms(shared, context))
        terms = joined_terms(joined_terms(terms, beside), shared[None])
        stream = stream_of(terms, residual).astype(jnp.float32) * 2**-0.5
        terms, before = stream.astype(shared.dtype)[None], None
    if mlp is None:
        return _finished(layer, terms, residual, context)
    reading = mlp.activations if context.is_cached else None
    residual, x = _read(layer.mlp_norm, terms, before, reading)
    terms = _written(layer.mlp_post_norm, mlp.terms(x, context))
    return _finished(layer, terms, residual, context)
