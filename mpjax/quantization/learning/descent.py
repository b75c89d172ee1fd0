"""Gradient descent that returns the best of the points that it came to."""

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
    """How scales are learned.

    epochs: passes over the calibration text. rate: of Adam, the relative change of a scale in a
        step at the start; it falls to zero.
    table: whether the entries of a table are learned, too.
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
        """Reads the table `learning` of a recipe. Raises ValueError for other keys and values."""
        if not isinstance(content, Mapping):
            raise ValueError(f"learning is {shown(content)}: expected a table, [learning]")
        known = [field.name for field in dataclasses.fields(cls)]
        for name in sorted(content.keys() - known):
            raise ValueError(f"learning has a key {name!r:.80}: expected {', '.join(known)}")
        return cls(**content)

    def to_toml(self) -> list[str]:
        """The lines of a table that `parse` reads."""
        return [f"{name} = {json.dumps(value)}" for name, value in dataclasses.asdict(self).items()]


def descend(
    learning: Learning,
    start: Any,
    batches: int,
    gradient: Callable[[Any, int], Any],
    total: Callable[[Any], float],
    advance: Callable[[int], None] = lambda steps: None,
) -> tuple[Any, list[float]]:
    """The parameters with the least total loss, of the start and the ends of epochs.

    start: a pytree of float32 arrays. batches: their number in an epoch.
    gradient: the gradient of the loss of a batch at parameters. total: the loss of all batches.
    advance: is called after each step, with 1.

    Returns the parameters, and the totals in their order. Raises ValueError without optax.
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


@functools.cache  # one object, for which `_step` is compiled
def _optimizer() -> Any:
    return require_optax("learn").scale_by_adam()


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(2, 3))
def _step(optimizer: Any, parameters: Any, found: Any, moments: Any, rate: float) -> Any:
    with jax.numpy_dtype_promotion("standard"):  # optax relies on promotion
        updates, moments = optimizer.update(found, moments)
        return jax.tree.map(lambda p, u: p - rate * u, parameters, updates), moments


def mean(losses: Iterable[tuple[jax.Array, jax.Array]]) -> float:
    """The mean of pairs of sums and counts."""
    sums, counts = zip(*losses, strict=True)
    return float(jnp.stack(sums).sum() / jnp.maximum(jnp.stack(counts).sum(), 1))
