"""The activation between the two products of an expert: SiLU, GELU, or gpt-oss's clamped SwiGLU."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from mpjax.kernels.checks import shown, static_number
from mpjax.kernels.rowwise.reference import ACTIVATIONS


@dataclasses.dataclass(frozen=True)
class Gate:
    """The product of an activated gate and an up value; static and hashable.

    Without a limit it is SiLU(gate) · up. With a limit it is (up + 1) · gate · σ(alpha · gate),
    where the gate is clamped from above, and up from both sides (gpt-oss).

    activation: `silu`, or `gelu` (its tanh approximation), with which there is no limit and alpha.

    Raises ValueError for a number that is not positive and finite, and for another activation.
    """

    limit: float | None = None
    alpha: float = 1.0
    activation: str = "silu"

    def __post_init__(self) -> None:
        for name in ("limit", "alpha"):
            value = static_number(f"Gate: {name}", getattr(self, name), float, "a positive number")
            object.__setattr__(self, name, value)
        name = self.activation
        if not isinstance(name, str) or name not in ACTIVATIONS:
            expected = " or ".join(ACTIVATIONS)
            raise ValueError(f"Gate: activation is {shown(name)}: expected {expected}")
        if name != "silu" and (self.limit is not None or self.alpha != 1):
            raise ValueError(f"Gate: activation is {shown(name)}: expected no limit and alpha")

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """The product of float32 arrays of one shape; also inside of kernels."""
        if self.limit is not None:
            gate = jnp.minimum(gate, self.limit)
            up = jnp.clip(up, -self.limit, self.limit) + 1.0
        argument = ACTIVATIONS[self.activation](gate)
        return gate / (1.0 + jnp.exp(-self.alpha * argument)) * up
