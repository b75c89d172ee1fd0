"""Arithmetic of float32 values in plain jnp, inside and outside of kernels."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

LOG2_E = math.log2(math.e)


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two parts with 12-bit significands whose sum is x.

    Products of two such parts are exact in float32 (Dekker's splitting).
    """
    high = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=11)
    return high, x - high


def divide(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """Divides float32 values; correctly rounded if a 16-bit dtype holds the denominator exactly.

    For other denominators, a few quotients in a million differ by one unit in the last place. XLA's
    own division may be off by two units on a GPU, which changes how ties between codes are rounded.
    """
    quotient = jnp.divide(numerator, denominator)
    (high, low), (large, small) = _halves(quotient), _halves(denominator)
    remainder = numerator - high * large - high * small - low * large - low * small
    corrected = quotient + jnp.divide(remainder, denominator)
    return jnp.where(jnp.isinf(quotient), quotient, corrected)


def largest_magnitude(x: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
    """max|x| of float32 along axes; NaN if an element along them is NaN or infinite.

    Magnitudes are compared as integers, which have the order of floats, with NaN above all others.
    On a CPU, XLA's maximum of floats ignores NaN.
    """
    order = jax.lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(0x7FFFFFFF)
    peaks = jax.lax.bitcast_convert_type(order.max(axis), jnp.float32)
    return peaks + (peaks - peaks)  # turns infinity into NaN: no scale represents it


def power_above(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The smallest power of two above x ≥ 0, and its inverse, both float32.

    So x / power is in [1/2, 1). Powers are clipped to 2**-111 … 2**126, so x / power is below 1/2
    for x below 2**-112, and at least 1 for x from 2**126 on. The power of zero is 1.
    """
    exponent = jax.lax.bitcast_convert_type(x, jnp.uint32) >> jnp.uint32(23)
    exponent = jnp.clip(exponent, jnp.uint32(15), jnp.uint32(252)) + jnp.uint32(1)
    exponent = jnp.where(x == 0, jnp.uint32(127), exponent)
    powers = (exponent << jnp.uint32(23), (jnp.uint32(254) - exponent) << jnp.uint32(23))
    power, inverse = (jax.lax.bitcast_convert_type(bits, jnp.float32) for bits in powers)
    return power, inverse
