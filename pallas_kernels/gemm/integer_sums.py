"""Integer sums whose final bits are float32 numbers, without a conversion.

Around 1.5 · 2²³, neighbouring float32 numbers are 1 apart. An integer sum that begins with the bits
of 1.5 · 2²³, and changes by less than 2²², therefore ends with the bits of 1.5 · 2²³ plus the sum.
A subtraction replaces a conversion, which is slow on a GPU.

A sum that is scaled immediately needs no separate subtraction: one fused multiply-add, which rounds
once, computes float · scale − OFFSET · scale, if OFFSET · scale is exact. The significand of 1.5 ·
scale has up to two bits more than the scale's. So the last two bits of the scale are cleared, which
changes it by less than 2⁻²¹.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mpjax.kernels.target import current_target

OFFSET, OFFSET_BITS = 1.5 * 2.0**23, 0x4B400000
LAST_TWO_BITS = 0x3


def as_float(total: jax.Array) -> jax.Array:
    """A sum as float32: a float32 total itself, or an int32 total that began with OFFSET_BITS."""
    if total.dtype != jnp.int32:
        return total
    return jax.lax.bitcast_convert_type(total, jnp.float32) - OFFSET


def without_last_bits(scale_bits: jax.Array) -> jax.Array:
    """The uint32 bits of float32 scales with which `scaled` is exact."""
    return scale_bits & jnp.uint32(0xFFFFFFFF - LAST_TWO_BITS)


def scaled(total: jax.Array, scale: jax.Array) -> jax.Array:
    """An int32 total that began with OFFSET_BITS, times scales `without_last_bits`, in float32."""
    target = current_target()
    if target.is_interpreted:  # in interpret mode, product and sum may be rounded separately
        return as_float(total) * scale
    bits = jax.lax.bitcast_convert_type(total, jnp.float32)
    return target.multiply_add(bits, scale, scale * -OFFSET)
