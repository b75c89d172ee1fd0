"""Looking inside of a decoder: what its layers compute is captured, or changed.

A layer that is watched runs in parts; the others run as if nobody looked.
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
    """Changes what some layers compute: a pytree, whose arrays are traced.

    layers: numbers of layers (static). at: one of "residual", the stream that enters a layer;
        "attention" and "mlp", the outputs that are added to it (static).
    """

    layers: tuple[int, ...]
    at: str

    @abc.abstractmethod
    def __call__(self, value: jax.Array, layer: int, positions: jax.Array) -> jax.Array:
        """The value to go on with, [..., hidden], in the place of one that a layer has computed.

        value: [batch, tokens, hidden], or varlen [tokens, hidden]. positions: int32, without the
        last axis: of each token in its sequence.
        """


@dataclasses.dataclass(frozen=True)
class _Vectors(Steer):
    """Vectors [hidden], or [layers, hidden] with one for each layer, from a position on."""

    vectors: Any
    layers: tuple[int, ...]
    at: str = "residual"
    begin: Any = 0

    def __call__(self, value: jax.Array, layer: int, positions: jax.Array) -> jax.Array:
        """The value with the layer's vector at all positions from `begin` on."""
        vectors = jnp.asarray(self.vectors)
        own = vectors[self.layers.index(layer)] if vectors.ndim == 2 else vectors
        own = jax.lax.broadcast_to_rank(own.astype(value.dtype), value.ndim)
        return jnp.where((positions >= self.begin)[..., None], self._changed(value, own), value)

    @abc.abstractmethod
    def _changed(self, value: jax.Array, own: jax.Array) -> jax.Array:
        """The value with the vector at all positions."""


_register = functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["vectors", "begin"],
    meta_fields=["layers", "at"],
)


@_register
@dataclasses.dataclass(frozen=True)
class Addition(_Vectors):
    """Adds vectors to what layers compute.

    vectors: [hidden], or [layers, hidden] with one for each layer. layers, at: as in Steer. begin:
    the first position that is changed, an integer or int32 scalar.
    """

    def _changed(self, value: jax.Array, own: jax.Array) -> jax.Array:
        return value + own


@_register
@dataclasses.dataclass(frozen=True)
class Replacement(_Vectors):
    """Puts vectors in the place of what layers compute. The fields are those of Addition."""

    def _changed(self, value: jax.Array, own: jax.Array) -> jax.Array:
        return jnp.broadcast_to(own, value.shape)


class Watch:
    """What is captured and changed in one step, and what has been captured so far.

    It is made where a step is traced, and lives as long. capture: layers by the points of POINTS.
    """

    def __init__(self, capture: Capture, steer: Sequence[Steer], positions: jax.Array) -> None:
        self._capture, self._steer, self._positions = capture, steer, positions
        self.found: Captured = {}

    def touches(self, layer: int, *points: str) -> bool:
        """Whether anything of a layer is captured or changed, at any point or at some."""
        captured = any(self.captures(point, layer) for point in points or POINTS)
        steered = (one for one in self._steer if one.at in (points or POINTS))
        return captured or any(layer in one.layers for one in steered)

    def see(self, point: str, layer: int, value: jax.Array) -> jax.Array:
        """The value to go on with in the place of one that a layer has computed."""
        for one in self._steer:
            if one.at == point and layer in one.layers:
                value = one(value, layer, self._positions).astype(value.dtype)
        if self.captures(point, layer):
            self.found.setdefault(point, {})[layer] = value
        return value

    def captures(self, point: str, layer: int) -> bool:
        """Whether what a layer computes at a point is captured."""
        return layer in self._capture.get(point, ())


def watching(cache: DecoderCache, context: StepContext, tokens: jax.Array) -> StepContext:
    """The context of a step whose cache says what is captured and changed."""
    if not cache.captured and not cache.steer:
        return context
    capture = {point: tuple(layers) for point, layers in (cache.captured or {}).items()}
    watch = Watch(capture, cache.steer, context.positions(tokens.shape))
    return dataclasses.replace(context, watch=watch)


def put_captured(captured: Captured | None, context: StepContext) -> Captured | None:
    """What was captured, [batch, positions, ...], with a step's values at their positions."""
    if not captured:
        return captured
    assert context.watch is not None

    def put(target: jax.Array, value: jax.Array) -> jax.Array:
        shape = value.shape[:-1]
        sequence, is_real = context.places(shape)
        position = context.positions(shape).reshape(-1)
        place = jnp.where(is_real, position, target.shape[1])
        flat = value.reshape(-1, *target.shape[2:]).astype(target.dtype)
        return target.at[sequence, place].set(flat, mode="drop")

    return jax.tree.map(put, captured, context.watch.found)


def read_steer(model: Any, steer: Any) -> tuple[Steer, ...]:
    """The argument `steer` for a decoder. Raises ValueError for what it can't do."""
    found = (steer,) if isinstance(steer, Steer) else steer
    if not isinstance(found, Sequence) or not all(isinstance(one, Steer) for one in found):
        raise ValueError(f"steer is {shown(steer)}: expected a tuple of Steer, such as Addition")
    for one in found:
        if one.at == "router":
            raise ValueError('steer: at is "router", whose choices are captured alone')
        _require(model, "steer", one.at, one.layers)
    return tuple(found)


def read_capture(model: Any, capture: Any) -> dict[str, tuple[int, ...]]:
    """The argument `capture` for a decoder, layers by point. Raises ValueError as read_steer."""
    require_type("capture", capture, Mapping, hint=', such as {"residual": [3]}')
    for point, layers in capture.items():
        _require(model, "capture", point, layers)
    return {point: tuple(layers) for point, layers in capture.items() if len(layers)}


def _require(model: Any, name: str, point: Any, layers: Any) -> None:
    """Raises ValueError for a divided model, and for a point or layers that the model lacks."""
    config: DecoderConfig = model.config
    if model.mesh is not None:
        raise ValueError(
            f"{name}: the model is divided among {model.shards} devices, and its layers are looked "
            "at on one device alone"
        )
    if point not in POINTS:
        raise ValueError(f"{name} has {point!r}: expected one of {', '.join(POINTS)}")
    # The stream behind the last layer is that which would enter one more.
    specs: list[Any] = [*config.layers, *([None] if point == "residual" else [])]

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
    """Zeros for what is captured of sequences; shape: (sequences, positions)."""

    def zeros(point: str, layer: int) -> jax.Array:
        mlp = config.layers[layer].mlp if point == "router" else None
        if isinstance(mlp, ExpertsSpec):
            return jnp.zeros((*shape, mlp.routing.per_token), jnp.int32)
        return jnp.zeros((*shape, config.hidden_size), config.dtype)

    return {point: {one: zeros(point, one) for one in layers} for point, layers in capture.items()}
