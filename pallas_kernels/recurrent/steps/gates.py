"""The raw gates of recurrent layers, whose activations a step's kernel computes itself."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from mpjax.kernels.checks import as_arrays, require_floats, shown, static_number


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["decay", "rate", "speed", "shift"],
    meta_fields=["scale"],
)
@dataclasses.dataclass(frozen=True)
class DeltaGates:
    """The raw gates of the gated delta rule.

    The log of a state's decay factor is −exp(speed) · softplus(decay + shift), and β, the part of a
    difference that is written, is scale · sigmoid(rate).
    decay, rate: [..., value heads]. speed, shift: [value heads]. With a decay for each key channel,
        decay is [..., value heads, K], and shift [value heads, K]. scale: the largest β (static);
        None: 1.
    """

    of_tokens: ClassVar[tuple[str, ...]] = ("decay", "rate")
    decay: Any
    rate: Any
    speed: Any
    shift: Any
    scale: float | None = None

    def read(self, operation: str, shape: tuple[int, ...], channels: int) -> DeltaGates:
        """The gates as arrays. Raises ValueError unless decay and rate have this shape.

        channels: the number of decays of a head where each key channel has one.
        """
        [offsets] = as_arrays(operation, shift=self.shift)
        own = (channels,) if offsets.ndim == 2 else ()
        arrays = {name: getattr(self, name) for name in ("decay", "rate", "speed", "shift")}
        shapes = (*shape, *own), shape, shape[-1:], (*shape[-1:], *own)
        decay, rate, speed, shift = read_arrays(operation, arrays, shapes)
        scale = static_number(f"{operation}: scale", self.scale, float, "a positive number")
        return DeltaGates(decay, rate, speed, shift, scale)

    def applied(self) -> tuple[jax.Array, jax.Array]:
        """The log-decays and β, in float32."""
        decay, rate, speed, shift = wide(self.decay, self.rate, self.speed, self.shift)
        if shift.ndim == 2:
            speed = speed[:, None]
        speed, shift = (jax.lax.broadcast_to_rank(x, decay.ndim) for x in (speed, shift))
        return -jnp.exp(speed) * jax.nn.softplus(decay + shift), self.scaled(jax.nn.sigmoid(rate))

    def scaled(self, rate: jax.Array) -> jax.Array:
        """The sigmoids of rates, scaled to β."""
        return rate if self.scale is None else self.scale * rate


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["steps", "speed", "shift", "skip"],
    meta_fields=["least", "most"],
)
@dataclasses.dataclass(frozen=True)
class ScanGates:
    """The raw time steps and decays of Mamba2.

    A time step is softplus(steps + shift), clamped to `least` … `most`, and a state's decay factor
    is exp(−exp(speed) · step). Outputs include skip · x.

    steps: [..., heads]. speed, shift, skip: [heads]. least, most: None for no limit (static).
    """

    of_tokens: ClassVar[tuple[str, ...]] = ("steps",)
    steps: Any
    speed: Any
    shift: Any
    skip: Any
    least: float | None = None
    most: float | None = None

    def read(self, operation: str, shape: tuple[int, ...]) -> ScanGates:
        """The gates as arrays. Raises ValueError unless steps has this shape."""
        arrays = {name: getattr(self, name) for name in ("steps", "speed", "shift", "skip")}
        shapes = shape, *[shape[-1:]] * 3
        steps, speed, shift, skip = read_arrays(operation, arrays, shapes)
        least, most = (
            static_number(f"{operation}: {name}", limit, float, "a positive number")
            for name, limit in (("least", self.least), ("most", self.most))
        )
        return ScanGates(steps, speed, shift, skip, least, most)

    def applied(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Time steps [..., heads], rates [heads], 0 or less, and skip [heads], in float32."""
        steps, speed, shift, skip = wide(self.steps, self.speed, self.shift, self.skip)
        steps = jax.nn.softplus(steps + jax.lax.broadcast_to_rank(shift, steps.ndim))
        return self.limited(steps), -jnp.exp(speed), skip

    def limited(self, steps: jax.Array) -> jax.Array:
        """The time steps clamped to their limits."""
        if self.least is not None:
            steps = jnp.maximum(steps, self.least)
        return steps if self.most is None else jnp.minimum(steps, self.most)


def for_tokens(function: Callable[[Any], Any], gates: Any) -> Any:
    """The gates with a function of each array that has an axis of tokens.

    gates: DeltaGates or ScanGates; or parameters without such arrays, which are returned.
    """
    names = getattr(gates, "of_tokens", ())
    if not names:
        return gates
    return dataclasses.replace(gates, **{name: function(getattr(gates, name)) for name in names})


def read_arrays(
    operation: str, values: dict[str, Any], shapes: tuple[tuple[int, ...], ...]
) -> tuple[jax.Array, ...]:
    """The values as floating-point arrays. Raises ValueError for other shapes."""
    arrays = as_arrays(operation, **values)
    named = dict(zip(values, arrays, strict=True))
    require_floats(operation, **named)
    for (name, array), shape in zip(named.items(), shapes, strict=True):
        if array.shape != shape:
            raise ValueError(f"{operation}: {name} is {shown(array)}: expected {shape}")
    return arrays


def wide(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays in float32."""
    return tuple(array.astype(jnp.float32) for array in arrays)
