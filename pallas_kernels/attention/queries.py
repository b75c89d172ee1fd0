"""Prepares a tile's queries as operands of the tensor cores.

Steps s and zeros z of key channels are applied to the query q, for every tile of keys: a score is
Σ (q·s) · code + Σ q·z, summed over head channels. The products q·s and q·z are float16. bfloat16
queries lose several times less precision in them than keys rounded to bfloat16 would. Products of
float16 queries are two float16 terms each, which are exact for normal numbers. Each row of queries
is divided by a power of two, so that no product with a float16 number overflows float16. Products
with the steps of keys below about 1e-3 are subnormal in float16, and lose more.
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

MMA_SLOTS = 16  # the most slots of a tensor-core instruction, the fewest of a product


class Queries(NamedTuple):
    """The queries of a tile's rows in 16 bits, times powers of two and divided by `unit`."""

    parts: list[jax.Array]  # [rows, channels] of each part of the head's channels
    sum: jax.Array  # float32 [rows], the sum of the original queries' channels
    unit: jax.Array | None = None  # [rows], powers of two; None for 1


def prepare(
    loaded: Sequence[jax.Array],
    shifts: Sequence[int],
    dtype: jnp.dtype,
    *,
    largest: jax.Array | None = None,
) -> Queries:
    """Scales queries and rounds them to the 16-bit `dtype` in which they are multiplied with keys.

    loaded: queries [rows, channels] of each part of the head's channels.
    shifts: for each part, the exponent of the power of two by which it is multiplied.
    largest: the largest magnitude of each row, [rows]. With it, each row is divided by a power of
        two such that its largest magnitude is at least 1/2 and below 1. None: no division.
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
    """Multiplies queries by the steps s and the zeros z of key channels.

    parameters: steps and zeros, float16 [channels], of each part of the head's channels.
    shifts: as for `prepare`.
    midpoint: the middle m of the range of codes, or None.

    Returns the products q·s, a list of float16 terms [rows, channels] for each part, and Σ q·z
    [rows]. Both are divided by the queries' unit.

    With a midpoint, a product is one rounded term r ≈ q·s, and Σ q·z is computed as
    Σ q·(z + m·s) − m·Σ r. So the error of r counts times (code − m) in a score, not times the code.
    Without a midpoint, a product is two terms: its value rounded to float16, and the remainder,
    which float16 holds except for digits below its subnormals.
    """

    # The tensor cores compute the sums, the same for each slot, as products with a constant. If
    # zeros were the other operand, they would be loaded again, separately from the steps.
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
            zero_terms = bits.multiply_exactly(q, zero)
        else:
            products.append([bits.multiply(q, step)])
            again = bits.multiply(q, step, copy=1)
            sums[shift] += times(-midpoint, again)
            zero = bits.multiply(step, jnp.full_like(step, midpoint), zero)
            zero_terms = [bits.multiply(q, zero)]
        for term in zero_terms:
            sums[shift] += times(1.0, term)
    total = functools.reduce(operator.add, (x * 2.0**-shift for shift, x in sums.items()))
    return products, total.max(oriented.slots)  # all slots hold the same sum
