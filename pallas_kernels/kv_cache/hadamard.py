"""The Hadamard transform of a head: it spreads channels that are large over all others.

Keys have a few such channels, and they alone decide the step with which a token's are rounded. The
transform is orthogonal and its own inverse, so that scores of queries and keys that both went
through it are what they were (QuaRot section 4.2). Of a head of n · odd channels, n a power of two,
each n that are `odd` apart go through H / √n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from mpjax.kernels.launch import join
from mpjax.kernels.target import current_target


def order(dim: int) -> int:
    """How many of `dim` channels a transform spreads each over: the power of two in it."""
    return dim & -dim


def transform(x: jax.Array) -> jax.Array:
    """The transform of x [..., dim] in its dtype, as a product in float32.

    For queries, and for reading keys back: how its sums are rounded is up to the product.
    """
    dim = x.shape[-1]
    count = order(dim)
    index = jnp.arange(count)
    signs = 1 - 2 * (jax.lax.population_count(index[:, None] & index[None]) & 1)
    groups = x.astype(jnp.float32).reshape(*x.shape[:-1], count, dim // count)
    spread = jnp.einsum("...ns,nm->...ms", groups, signs.astype(jnp.float32), precision="highest")
    return (spread * (1 / math.sqrt(count))).astype(x.dtype).reshape(x.shape)


def transform_pieces(
    pieces: Sequence[jax.Array], dim: int, dtype: jax.typing.DTypeLike
) -> list[jax.Array]:
    """The same, bit for bit the same everywhere; also in a kernel.

    pieces: equal slices [..., lanes] of a head of `dim` channels, a power of two of them, at their
        lanes: in runs of neighbours that stay together, each filled up to a power of two.

    Sums and differences in float32, of channels that are dim / 2 apart, then dim / 4 and so on; the
    product with 1/√n; and one rounding to `dtype`. Returns float32.
    """
    parts = [piece.astype(jnp.float32) for piece in pieces]
    step = len(parts) // 2
    while step:
        parts = [
            parts[i - step] - part if i & step else part + parts[i + step]
            for i, part in enumerate(parts)
        ]
        step //= 2
    count = order(dim)
    runs = count // len(parts)  # in a piece
    factor = jnp.float32(1 / math.sqrt(count))
    round_to = current_target().round_to
    return [round_to(_spread(part, runs) * factor, jnp.dtype(dtype)) for part in parts]


def _spread(x: jax.Array, runs: int) -> jax.Array:
    """Sums and differences of the runs of neighbours that are in one piece."""
    shape, width = x.shape, x.shape[-1]
    while runs > 1:
        first, second = jnp.split(x.reshape(-1, width), 2, axis=-1)
        x = join([first + second, first - second])
        width, runs = width // 2, runs // 2
    return x.reshape(shape)
