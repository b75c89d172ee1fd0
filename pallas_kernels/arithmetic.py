"""Arithmetic of float32 values in plain jnp, inside and outside of kernels."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

LOG2_E = math.log2(math.e)


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Parts of 12 bits whose sum is x: products of two such parts need no rounding (Dekker)."""
    high = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=11)
    return high, x - high


def divide(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """float32 division, correctly rounded wherever a 16-bit dtype holds the denominator.

    Others may be a unit in the last place off, a few times in a million. XLA's own division may be
    two off on a GPU, which moves codes at ties.
    """
    quotient = jnp.divide(numerator, denominator)
    (high, low), (large, small) = _halves(quotient), _halves(denominator)
    remainder = numerator - high * large - high * small - low * large - low * small
    corrected = quotient + jnp.divide(remainder, denominator)
    return jnp.where(jnp.isinf(quotient), quotient, corrected)


def largest_magnitude(x: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
    """max|x| of float32 along axes; NaN where any of these is NaN or infinite.

    As integers, magnitudes have the same order, and NaN is the largest: on a CPU, XLA's maximum of
    floats passes over it.
    """
    order = jax.lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(0x7FFFFFFF)
    peaks = jax.lax.bitcast_convert_type(order.max(axis), jnp.float32)
    return peaks + (peaks - peaks)  # an infinity, beside which no other has a code, becomes NaN


def power_above(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A power of two above x, float32 and not negative, and its inverse; x over it is at least 1/2.

    So it is from 2**-112 to 2**126. The power of what is less is 2**-111, and that of zero 1.
    """
    exponent = jax.lax.bitcast_convert_type(x, jnp.uint32) >> jnp.uint32(23)
    exponent = jnp.clip(exponent, jnp.uint32(15), jnp.uint32(252)) + jnp.uint32(1)
    exponent = jnp.where(x == 0, jnp.uint32(127), exponent)
    powers = (exponent << jnp.uint32(23), (jnp.uint32(254) - exponent) << jnp.uint32(23))
    power, inverse = (jax.lax.bitcast_convert_type(bits, jnp.float32) for bits in powers)
    return power, inverse
