"""The Hadamard transform of a head's channels, which spreads large channels over all others.

Keys have a few channels that are much larger than the rest, and these alone determine the step with
which a token's key is rounded. The transform is orthogonal and its own inverse, so scores do not
change if both queries and keys are transformed (QuaRot section 4.2). A head of n · m channels, n a
power of two and m odd, is transformed by H / √n, with H the Hadamard matrix of order n, in m sets
of n channels that are m apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from mpjax.kernels import device
from mpjax.kernels.launch import join
from mpjax.kernels.target import current_target


def order(dim: int) -> int:
    """The order of the transform of `dim` channels: the largest power of two that divides `dim`."""
    return dim & -dim


def transform(x: jax.Array) -> jax.Array:
    """The transform of x [..., dim], summed in float32 and returned in x's dtype.

    For queries, and for decoding keys. The rounding of its sums depends on the device. Products of
    16-bit numbers and signs are exact, so a GPU multiplies them on tensor cores as they are.
    """
    dim = x.shape[-1]
    count = order(dim)
    index = jnp.arange(count)
    signs = 1 - 2 * (jax.lax.population_count(index[:, None] & index[None]) & 1)
    narrow = x if device.on_gpu() else x.astype(jnp.float32)
    spread = jnp.einsum(
        "...ns,nm->...ms",
        narrow.reshape(*x.shape[:-1], count, dim // count),
        signs.astype(narrow.dtype),
        precision="highest",
        preferred_element_type=jnp.float32,
    )
    return (spread * (1 / math.sqrt(count))).astype(x.dtype).reshape(x.shape)


def transform_pieces(
    pieces: Sequence[jax.Array], dim: int, dtype: jax.typing.DTypeLike
) -> list[jax.Array]:
    """The transform of a head in pieces, bit-identical on every device; also inside kernels.

    pieces: a power of two of equal slices [..., lanes] of a head of `dim` channels. The lanes of a
        slice are those of `writing.lanes`: runs of m neighbouring channels, m the odd factor of
        `dim`, each padded to a power of two.

    Computes in float32 sums and differences of channels that are dim / 2 apart, then dim / 4 and so
    on, multiplies by 1/√n, and rounds once to `dtype`. Returns float32.
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
    runs = count // len(parts)  # the number of runs in a piece
    factor = jnp.float32(1 / math.sqrt(count))
    round_to = current_target().round_to
    return [round_to(_spread(part, runs) * factor, jnp.dtype(dtype)) for part in parts]


def _spread(x: jax.Array, runs: int) -> jax.Array:
    """The transform along the runs of one piece x [..., lanes], without the factor 1/√n.

    runs: their number, a power of two. Each step of this fast Walsh–Hadamard transform halves every
    segment of the last axis, and puts the sum of both halves before their difference.
    """
    shape, width = x.shape, x.shape[-1]
    while runs > 1:  # `width` is the length of a segment, and `runs` the number of runs in it
        first, second = jnp.split(x.reshape(-1, width), 2, axis=-1)
        x = join([first + second, first - second])
        width, runs = width // 2, runs // 2
    return x.reshape(shape)
