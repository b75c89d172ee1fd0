"""The activation between the two products of an expert: SiLU, or gpt-oss's clamped SwiGLU."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from mpjax.kernels.checks import static_number


@dataclasses.dataclass(frozen=True)
class Gate:
    """The product of an activated gate and an up value; static and hashable.

    Without a limit it is SiLU(gate) · up. With a limit it is (up + 1) · gate · σ(alpha · gate),
    where the gate is clamped from above, and up from both sides (gpt-oss).

    Raises ValueError for a number that is not positive and finite.
    """

    limit: float | None = None
    alpha: float = 1.0

    def __post_init__(self) -> None:
        for name in ("limit", "alpha"):
            value = static_number(f"Gate: {name}", getattr(self, name), float, "a positive number")
            object.__setattr__(self, name, value)

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """The product of float32 arrays of one shape; also inside of kernels."""
        if self.limit is not None:
            gate = jnp.minimum(gate, self.limit)
            up = jnp.clip(up, -self.limit, self.limit) + 1.0
        return gate / (1.0 + jnp.exp(-self.alpha * gate)) * up
