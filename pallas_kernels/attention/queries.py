"""A tile's queries as operands of the tensor cores, where keys have scales of channels or none.

Steps and zeros of keys' channels meet the query, once for every tile: Σ (q·s) · code + Σ q·z. Both
products are float16, in which bfloat16's queries lose a few times less than keys in bfloat16 would;
float16's queries are two terms, which lose nothing of normal numbers. Each row is divided by a
power of two, so that none of its products with float16's numbers is beyond float16; those of keys
below about 1e-3 are subnormal, and lose more.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mpjax.kernels import bits
from mpjax.kernels.arithmetic import power_above
from mpjax.kernels.attention.orientation import Orientation
from mpjax.kernels.target import current_target

MMA_SLOTS = 16  # of a tensor-core instruction at most, and of a product at least


class Queries(NamedTuple):
    """Those of a tile's rows, a part of the channels each, times 2**shift and over `unit`."""

    parts: list[jax.Array]  # [rows, channels] each
    sum: jax.Array  # [rows], of all channels as they were
    unit: jax.Array | None = None  # [rows], powers of two, or None for 1


def prepare(
    loaded: Sequence[jax.Array],
    shifts: Sequence[int],
    dtype: jnp.dtype,
    *,
    largest: jax.Array | None = None,
) -> Queries:
    """Queries [rows, channels] of each part in the 16 bits in which they meet keys.

    shifts: powers of two to multiply each part by. largest: of each row's magnitudes, [rows]; with
    it, rows are divided by powers of two, so that all is below 1, and the largest not below a half.
    """
    wide, unit = [q.astype(jnp.float32) for q in loaded], None
    total = sum((q.sum(1) for q in wide[1:]), wide[0].sum(1))
    if largest is not None:
        unit, inverse = power_above(largest)
        wide = [q * inverse[:, None] for q in wide]
    target = current_target()
    parts = [
        target.narrow(target.times_power(q, shift), dtype)
        for q, shift in zip(wide, shifts, strict=True)
    ]
    return Queries(parts, total, unit)


def times_channels(
    queries: Queries,
    parameters: Iterable[tuple[jax.Array, jax.Array]],
    shifts: Sequence[int],
    oriented: Orientation,
    *,
    midpoint: float | None,
) -> tuple[list[list[jax.Array]], jax.Array]:
    """Queries times the steps of channels, a list of terms for each part, and Σ q·z [rows].

    All over the queries' unit. parameters: steps and zeros [channels] of each part, float16.
    midpoint: of the codes, m. With it, products are rounded, and Σ q·z is Σ q·(z + m·s) − m·Σ q·s
    of rounded ones: then what rounding takes counts as often as codes differ from it.
    Without, products are two terms, what they are in 16 bits and what that leaves, which 16 bits
    hold but for what is less than float16's subnormals.
    """

    # The tensor cores sum, alike in all slots. Zeros as their other operand would have to be loaded
    # once more, apart from steps.
    def times(factor: float, term: jax.Array) -> jax.Array:
        return oriented.times_queries(
            jnp.full((MMA_SLOTS, term.shape[1]), factor, term.dtype), term
        )

    sums = {shift: jnp.zeros(oriented.shape(MMA_SLOTS, len(queries.sum))) for shift in shifts}
    products = []
    for q, shift, (step, zero) in zip(queries.parts, shifts, parameters, strict=True):
        step, zero = jnp.broadcast_to(step, q.shape), jnp.broadcast_to(zero, q.shape)
        if midpoint is None:
            products.append(bits.multiply_exactly(q, step))
            of_zero = bits.multiply_exactly(q, zero)
        else:
            products.append([bits.multiply(q, step)])
            again = bits.multiply(q, step, copy=1)
            sums[shift] += times(-midpoint, again)
            zero = bits.multiply(step, jnp.full_like(step, midpoint), zero)
            of_zero = [bits.multiply(q, zero)]
        for term in of_zero:
            sums[shift] += times(1.0, term)
    total = functools.reduce(operator.add, (x * 2.0**-shift for shift, x in sums.items()))
    return products, total.max(oriented.slots)
