"""Several residual streams, of which each layer reads one and changes all (AltUp; Gemma 3n)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.kernels.rowwise.projection import project
from mpjax.models.config import DecoderConfig
from mpjax.models.layers import Linear, RMSNorm
from mpjax.models.maps import LinearMaps
from mpjax.models.per_layer import WholeSpec, terms_of
from mpjax.models.state import StepContext

LEAST_SQUARE = 1e-5  # the least mean square of a stream's channels by which it is divided
_LAYER = "model.layers.{layer}."
NAMES: Mapping[str, str] = {  # in Hugging Face's files, as in `parameters.NAMES`
    "streams.widen": "model.altup_projections.{layer}.weight",
    "streams.unite": "model.altup_unembed_projections.{layer}.weight",
    "streams.router": f"{_LAYER}altup.modality_router.weight",
    "streams.router_norm.weight": f"{_LAYER}altup.router_norm.weight",
    "streams.prediction": f"{_LAYER}altup.prediction_coefs.weight",
    "streams.correction": f"{_LAYER}altup.correction_coefs.weight",
    "streams.gain": f"{_LAYER}altup.correct_output_scale",
    "streams.left": f"{_LAYER}laurel.linear_left",
    "streams.right": f"{_LAYER}laurel.linear_right",
    "streams_post_norm.weight": f"{_LAYER}laurel.post_laurel_norm.weight",
}


@dataclasses.dataclass(frozen=True)
class StreamsSpec(WholeSpec):
    """Spec of a layer's part in several residual streams, and of a map beside its mixer.

    Before the layer, all streams are predicted from one another. Mixer and MLP read and write the
    active stream, and its change corrects all streams (AltUp, arXiv 2301.13310). The map of low
    rank, right(left(x)), has the mixer's input x; the layer adds its norm, x and the mixer's output
    to the stream, and divides the sum by √2 (LAuReL, arXiv 2411.07501). The sublayer of per-layer
    embeddings reads the corrected active stream, and is added to all streams but the first.

    count: of streams. rank: of the map. active: the active stream, counted from 1.
    has_gain: whether per-layer embeddings read the active stream times `gain`.
    """

    kind: ClassVar[str] = "streams"
    count: int
    rank: int
    active: int = 1
    has_gain: bool = True

    def why_unsound(self) -> str | None:
        """The reason why there is no such stream, or None."""
        if self.active <= self.count:
            return None
        return f"active is {self.active}: expected at most the {self.count} streams"

    def build(self, config: DecoderConfig, rngs: nnx.Rngs) -> Streams:
        """A Streams module with random weights."""
        return Streams(config, self, rngs)

    def linear_maps(self, config: DecoderConfig) -> tuple[LinearMaps, ...]:
        """Two products: `left` and `right`."""
        hidden = config.hidden_size
        shapes = {"left": (hidden, self.rank), "right": (self.rank, hidden)}
        return tuple(LinearMaps(path, (shape,), is_precise=True) for path, shape in shapes.items())

    def arrays(self, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
        """Shapes of the router, of its norm, of the coefficients and of the gain, by path."""
        count, hidden = self.count, config.hidden_size
        return {
            "router": (count, hidden),
            "router_norm.weight": (hidden,),
            "prediction": (count * count, count),
            "correction": (count, count),
            "gain": (hidden,),
        }


class Streams(nnx.Module):
    """A layer's part in the residual streams; see StreamsSpec."""

    def __init__(self, config: DecoderConfig, spec: StreamsSpec, rngs: nnx.Rngs):
        self.left, self.right = (
            Linear.create(maps.shapes[0], bias=False, dtype=config.dtype, rngs=rngs)
            for maps in spec.linear_maps(config)
        )
        self.router_norm = RMSNorm.of(config, config.hidden_size)
        normal, shapes = nnx.initializers.normal(0.02), spec.arrays(config)
        del shapes["router_norm.weight"]
        self.router, self.prediction, self.correction, self.gain = (
            nnx.Param(normal(rngs.params(), shape, config.dtype)) for shape in shapes.values()
        )
        self.active, self.has_gain = spec.active - 1, spec.has_gain

    def predicted(self, streams: jax.Array) -> jax.Array:
        """The streams [count, ..., hidden] that the layer's sublayers read and correct."""
        count, wide = len(streams), streams.astype(jnp.float32)
        rows = _times(self._routed(streams[self.active]), self.prediction)
        rows = rows.reshape(*rows.shape[:-1], count, count)
        change = jnp.einsum("...ji,i...h->j...h", rows, wide, precision=jax.lax.Precision.HIGHEST)
        return (wide + change).astype(streams.dtype)

    def corrected(self, predicted: jax.Array, stream: jax.Array) -> jax.Array:
        """All streams after the layer. stream: the active one after mixer and MLP."""
        factors = jnp.moveaxis(1 + _times(self._routed(stream), self.correction), -1, 0)
        wide = predicted.astype(jnp.float32)
        change = stream.astype(jnp.float32) - wide[self.active]
        return (wide + factors[..., None] * change[None]).astype(predicted.dtype)

    def read(self, streams: jax.Array) -> jax.Array:
        """The input [..., hidden] of per-layer embeddings, from the corrected streams."""
        stream = streams[self.active]
        if not self.has_gain:
            return stream
        gain = self.gain.get_value().astype(jnp.float32)
        wide = stream.astype(jnp.float32) * jax.lax.broadcast_to_rank(gain, stream.ndim)
        return wide.astype(stream.dtype)

    def terms(self, x: jax.Array, context: StepContext) -> jax.Array:
        """Terms [splits, ..., hidden] whose sum is the map of low rank of x [..., hidden]."""
        low = terms_of(self.left, x, context).astype(jnp.float32).sum(0)
        return terms_of(self.right, low.astype(x.dtype), context)

    def _routed(self, stream: jax.Array) -> jax.Array:
        """The coefficients float32 [..., count] of a stream's tokens, from -1 to 1."""
        normed = self.router_norm(stream) * jnp.asarray(stream.shape[-1] ** -1.0, stream.dtype)
        return jnp.tanh(_times(normed, self.router))


class StreamMaps(nnx.Module):
    """The maps [hidden, hidden] from the embedding to all streams but the first, and back.

    widen0, widen1, …: to the second, third, … stream. unite0, unite1, …: back.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(0.02)
        for path, shape in map_shapes(config).items():
            name = path.removeprefix("streams.")
            setattr(self, name, nnx.Param(normal(rngs.params(), shape, config.dtype)))

    def widened(self, terms: jax.Array) -> jax.Array:
        """The streams [count, ..., hidden] before the first layer.

        terms: [1, ..., hidden], the embedding, which is the first stream. The others are maps of
        it, with its root mean square.
        """
        maps = [name for name in vars(self) if name.startswith("widen")]
        others = [_resized(_times(terms[0], getattr(self, name)), terms[0]) for name in maps]
        return jnp.stack([terms[0], *(other.astype(terms.dtype) for other in others)])

    def united(self, streams: jax.Array) -> jax.Array:
        """Terms float32 [count, ..., hidden] whose sum is the mean of the streams, mapped back."""
        first, *others = streams
        for number, stream in enumerate(others):
            others[number] = _resized(_times(stream, getattr(self, f"unite{number}")), first)
        return jnp.stack([first.astype(jnp.float32), *others]) / len(streams)


def map_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of the decoder's StreamMaps, by path; {} for a single stream."""
    spec, hidden = config.in_all_layers("streams"), config.hidden_size
    count = 0 if spec is None else spec.count - 1
    return {f"streams.{way}{i}": (hidden,) * 2 for way in ("widen", "unite") for i in range(count)}


def _times(x: jax.Array, weight: nnx.Param[jax.Array]) -> jax.Array:
    """Products float32 [..., rows] of x [..., channels] and a weight's rows [rows, channels]."""
    return project(x.astype(weight.get_value().dtype), weight.get_value())


def _resized(x: jax.Array, like: jax.Array) -> jax.Array:
    """X float32 [..., hidden] times a number, so that it has the root mean square of `like`."""
    target, own = (
        jnp.square(each.astype(jnp.float32)).mean(-1, keepdims=True) for each in (like, x)
    )
    return x * jnp.sqrt(target) * jax.lax.rsqrt(jnp.maximum(own, LEAST_SQUARE))
