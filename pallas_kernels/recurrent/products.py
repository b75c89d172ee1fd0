"""Products of bfloat16 tiles and float32 tiles in kernels, as exact as in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mpjax.kernels.target import current_target


def in_parts(x: jax.Array) -> list[jax.Array]:
    """Three bfloat16 tiles whose sum is exactly float32 x."""
    parts = []
    for _ in range(3):
        rounded = current_target().round_to(x, jnp.bfloat16)
        parts.append(rounded.astype(jnp.bfloat16))
        x = x - rounded
    return parts


def dot_parts(a: jax.Array | list[jax.Array], b: jax.Array | list[jax.Array]) -> jax.Array:
    """A · b, of which one is a bfloat16 tile and the other the parts of a float32 tile."""
    if isinstance(a, list):
        assert not isinstance(b, list)
        found = [current_target().dot(part, b) for part in reversed(a)]
    else:
        assert isinstance(b, list)
        found = [current_target().dot(a, part) for part in reversed(b)]
    return found[0] + found[1] + found[2]  # the smallest part first
