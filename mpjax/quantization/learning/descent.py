"""Gradient descent that returns the best parameters found."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.kernels.checks import require_type, shown, whole_number
from mpjax.quantization.clipping import require_optax


@dataclasses.dataclass(frozen=True)
class Learning:
    """Settings for learning scales.

    epochs: passes over the calibration text.
    rate: Adam's initial learning rate, as the relative change of a scale per step; it decays
        linearly to zero.
    table: whether to learn the entries of tables, too.
    """

    epochs: int = 4
    rate: float = 1e-2
    table: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "epochs", whole_number("Learning: epochs", self.epochs))
        require_type("Learning: table", self.table, bool)
        if isinstance(self.rate, bool) or not isinstance(self.rate, int | float):
            raise ValueError(f"Learning: rate is {shown(self.rate)}: expected a number")
        if not 0 < self.rate < 1:
            raise ValueError(f"Learning: rate is {self.rate}: expected more than 0, below 1")

    @classmethod
    def parse(cls, content: Any) -> Learning:
        """Reads the table `learning` of a recipe. Raises ValueError for invalid keys and values."""
        if not isinstance(content, Mapping):
            raise ValueError(f"learning is {shown(content)}: expected a table, [learning]")
        known = [field.name for field in dataclasses.fields(cls)]
        for name in sorted(content.keys() - known):
            raise ValueError(f"learning has a key {name!r:.80}: expected {', '.join(known)}")
        return cls(**content)

    def to_toml(self) -> list[str]:
        """The lines of the TOML table that `parse` reads."""
        return [f"{name} = {json.dumps(value)}" for name, value in dataclasses.asdict(self).items()]


def descend(
    learning: Learning,
    start: Any,
    batches: int,
    gradient: Callable[[Any, int], Any],
    total: Callable[[Any], float],
    advance: Callable[[int], None] = lambda steps: None,
) -> tuple[Any, list[float]]:
    """The parameters with the least total loss among the start and the ends of epochs.

    start: a pytree of float32 arrays. batches: number of batches in an epoch. gradient:
    (parameters, batch index) → gradient of the batch's loss. total: parameters → loss of all
    batches. advance: called with 1 after each step.

    Returns the parameters, and the total losses in order. Raises ValueError without optax.
    """
    optimizer = _optimizer()
    moments, parameters = optimizer.init(start), start
    best, totals = start, [total(start)]
    steps = learning.epochs * batches
    for step in range(steps):
        found = gradient(parameters, step % batches)
        rate = learning.rate * (1 - step / steps)
        parameters, moments = _step(optimizer, parameters, found, moments, rate)
        advance(1)
        if (step + 1) % batches == 0:
            totals.append(total(parameters))
            if totals[-1] < min(totals[:-1]):
                best = parameters
    return best, totals


@functools.cache  # `_step` is compiled for each object: keep one
def _optimizer() -> Any:
    return require_optax("learn").scale_by_adam()


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(2, 3))
def _step(optimizer: Any, parameters: Any, found: Any, moments: Any, rate: float) -> Any:
    with jax.numpy_dtype_promotion("standard"):  # optax relies on promotion
        updates, moments = optimizer.update(found, moments)
        return jax.tree.map(lambda p, u: p - rate * u, parameters, updates), moments


def mean(losses: Iterable[tuple[jax.Array, jax.Array]]) -> float:
    """The mean over all (sum, count) pairs."""
    sums, counts = zip(*losses, strict=True)
    return float(jnp.stack(sums).sum() / jnp.maximum(jnp.stack(counts).sum(), 1))
