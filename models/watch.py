"""Captures or steers the activations inside a decoder.

A watched layer runs in parts; all other layers run as usual.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from mpjax.kernels.checks import require_type, shown
from mpjax.models.config import DecoderConfig
from mpjax.models.experts import ExpertsSpec

if TYPE_CHECKING:
    from mpjax.models.state import DecoderCache, StepContext

POINTS = ("residual", "attention", "mlp", "router")

Capture = Mapping[str, Sequence[int]]
Captured = dict[str, dict[int, jax.Array]]


class Steer(abc.ABC):
    """A change of some layers' activations: a pytree, whose arrays are traced.

    layers: indices of layers (static). at: "residual", the stream that enters a layer, or
        "attention" or "mlp", the sublayer's output that is added to the stream (static).
    """

    layers: tuple[int, ...]
    at: str

    @abc.abstractmethod
    def __call__(self, value: jax.Array, layer: int, positions: jax.Array) -> jax.Array:
        """The activation [..., hidden] that replaces `value` of a layer.

        value: [batch, tokens, hidden], or varlen [tokens, hidden]. positions: int32, value's shape
        without the last axis: each token's position in its sequence.
        """


@dataclasses.dataclass(frozen=True)
class _Vectors(Steer):
    """Vectors [hidden], or [layers, hidden], one for each layer, applied from a position on."""

    vectors: Any
    layers: tuple[int, ...]
    at: str = "residual"
    begin: Any = 0

    def __call__(self, value: jax.Array, layer: int, positions: jax.Array) -> jax.Array:
        """The value, changed by the layer's vector at all positions from `begin` on."""
        vectors = jnp.asarray(self.vectors)
        own = vectors[self.layers.index(layer)] if vectors.ndim == 2 else vectors
        own = jax.lax.broadcast_to_rank(own.astype(value.dtype), value.ndim)
        return jnp.where((positions >= self.begin)[..., None], self._changed(value, own), value)

    @abc.abstractmethod
    def _changed(self, value: jax.Array, own: jax.Array) -> jax.Array:
        """The value, changed by the vector at all positions."""


_register = functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["vectors", "begin"],
    meta_fields=["layers", "at"],
)


@_register
@dataclasses.dataclass(frozen=True)
class Addition(_Vectors):
    """Adds vectors to activations of layers.

    vectors: [hidden], or [layers, hidden], one for each layer. layers, at: as in Steer. begin: the
    first position that is changed, an integer or int32 scalar.
    """

    def _changed(self, value: jax.Array, own: jax.Array) -> jax.Array:
        return value + own


@_register
@dataclasses.dataclass(frozen=True)
class Replacement(_Vectors):
    """Replaces activations of layers by vectors. The fields are as in Addition."""

    def _changed(self, value: jax.Array, own: jax.Array) -> jax.Array:
        return jnp.broadcast_to(own, value.shape)


class Watch:
    """The captures and changes of one step, and the activations captured so far.

    It exists only while a step is traced. capture: layers by point, one of POINTS.
    """

    def __init__(self, capture: Capture, steer: Sequence[Steer], positions: jax.Array) -> None:
        self._capture, self._steer, self._positions = capture, steer, positions
        self.found: Captured = {}

    def touches(self, layer: int, *points: str) -> bool:
        """Whether a layer is captured or changed at any of these points; without points, at any."""
        captured = any(self.captures(point, layer) for point in points or POINTS)
        steered = (one for one in self._steer if one.at in (points or POINTS))
        return captured or any(layer in one.layers for one in steered)

    def see(self, point: str, layer: int, value: jax.Array) -> jax.Array:
        """Captures a layer's activation at a point if wanted; returns it, changed by `steer`."""
        for one in self._steer:
            if one.at == point and layer in one.layers:
                value = one(value, layer, self._positions).astype(value.dtype)
        if self.captures(point, layer):
            self.found.setdefault(point, {})[layer] = value
        return value

    def captures(self, point: str, layer: int) -> bool:
        """Whether a layer's activation at a point is captured."""
        return layer in self._capture.get(point, ())


def watching(cache: DecoderCache, context: StepContext, tokens: jax.Array) -> StepContext:
    """The context of a step with the captures and changes that its cache requests."""
    if not cache.captured and not cache.steer:
        return context
    capture = {point: tuple(layers) for point, layers in (cache.captured or {}).items()}
    watch = Watch(capture, cache.steer, context.positions(tokens.shape))
    return dataclasses.replace(context, watch=watch)


def put_captured(cache: DecoderCache, context: StepContext) -> Captured | None:
    """The cache's captures, with the step's activations in their places."""
    captured, begins = cache.captured, cache.captured_at
    if not captured:
        return captured
    assert context.watch is not None

    def put(target: jax.Array, value: jax.Array) -> jax.Array:
        shape = value.shape[:-1]
        sequence, is_real = context.places(shape)
        position = context.positions(shape).reshape(-1)
        if begins is not None:
            position = position - begins[1, sequence]
            sequence = begins[0, sequence]
        place = jnp.where(is_real, position, target.shape[1])
        flat = value.reshape(-1, *target.shape[2:]).astype(target.dtype)
        return target.at[sequence, place].set(flat, mode="drop")

    return jax.tree.map(put, captured, context.watch.found)


def read_steer(model: Any, steer: Any) -> tuple[Steer, ...]:
    """The argument `steer` as a tuple. Raises ValueError if the decoder doesn't support it."""
    found = (steer,) if isinstance(steer, Steer) else steer
    if not isinstance(found, Sequence) or not all(isinstance(one, Steer) for one in found):
        raise ValueError(f"steer is {shown(steer)}: expected a tuple of Steer, such as Addition")
    for one in found:
        if one.at == "router":
            raise ValueError('steer: at is "router", whose choices are captured alone')
        _require(model, "steer", one.at, one.layers)
    return tuple(found)


def read_capture(model: Any, capture: Any) -> dict[str, tuple[int, ...]]:
    """Checks the argument `capture`; returns the layers to capture at each of POINTS.

    Raises ValueError for unknown points or layers, and for a model on several devices.
    """
    require_type("capture", capture, Mapping, hint=', such as {"residual": [3]}')
    for point, layers in capture.items():
        _require(model, "capture", point, layers)
    return {point: tuple(layers) for point, layers in capture.items() if len(layers)}


def _require(model: Any, name: str, point: Any, layers: Any) -> None:
    """Raises ValueError for a divided model, and for unknown points or layers."""
    config: DecoderConfig = model.config
    if model.mesh is not None:
        raise ValueError(
            f"{name}: the model is divided among {model.shards} devices, and its layers are looked "
            "at on one device alone"
        )
    if config.in_all_layers("streams"):
        raise ValueError(f"{name}: the model has several residual streams: expected one")
    if point not in POINTS:
        raise ValueError(f"{name} has {point!r}: expected one of {', '.join(POINTS)}")
    # The stream after the last layer has the index that a further layer would have.
    specs: list[Any] = [*config.layers[: config.depth], *([None] if point == "residual" else [])]

    def has(spec: Any) -> bool:
        if point == "router":
            return isinstance(spec.mlp, ExpertsSpec)
        return point == "residual" or point in spec.halves

    known = [number for number, spec in enumerate(specs) if has(spec)]
    wrong = [one for one in layers if type(one) is not int or one not in known]
    if wrong:
        raise ValueError(
            f"{name} has {wrong} for {point!r}: the layers of this model with one are {known}"
        )


def empty_captured(
    config: DecoderConfig, capture: Mapping[str, Sequence[int]], shape: tuple[int, ...]
) -> Captured:
    """Zeros for the captures of sequences. shape: (sequences, positions)."""

    def zeros(point: str, layer: int) -> jax.Array:
        mlp = config.layers[layer].mlp if point == "router" else None
        if isinstance(mlp, ExpertsSpec):
            return jnp.zeros((*shape, mlp.routing.per_token), jnp.int32)
        return jnp.zeros((*shape, config.hidden_size), config.dtype)

    return {point: {one: zeros(point, one) for one in layers} for point, layers in capture.items()}
