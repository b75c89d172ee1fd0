"""Products of bfloat16 tiles and float32 tiles in kernels, as exact as in float32."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from mpjax.kernels.target import current_target


def in_parts(x: jax.Array, count: int = 3) -> list[jax.Array]:
    """Bfloat16 tiles whose sum is float32 x: of three exactly, of two to 2⁻¹⁷ of each number."""
    parts = []
    for _ in range(count):
        part, rounded = current_target().split(x, jnp.bfloat16)
        parts.append(part)
        x = x - rounded
    return parts


def dot_parts(a: jax.Array | list[jax.Array], b: jax.Array | list[jax.Array]) -> jax.Array:
    """A · b of bfloat16 tiles, or of the parts of float32 tiles, in float32.

    Products of parts that are smaller than the tiles' rounding are left out.
    """
    first, second = (x if isinstance(x, list) else [x] for x in (a, b))
    most = max(len(first), len(second))
    # The smallest products come first.
    pairs = sorted(
        ((i, j) for i in range(len(first)) for j in range(len(second)) if i + j < most), key=sum
    )
    found = [current_target().dot(first[i], second[j]) for i, j in reversed(pairs)]
    return functools.reduce(jnp.add, found)
