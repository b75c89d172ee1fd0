"""Integer sums that are float32 when they end, without a conversion.

Around 1.5 · 2²³, neighbouring numbers in float32 are 1 apart. An integer sum that begins with its
bits, and changes by less than 2²², therefore ends with the bits of 1.5 · 2²³ plus the sum. A
subtraction takes the place of a conversion, which is slow on a GPU.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

OFFSET, OFFSET_BITS = 1.5 * 2.0**23, 0x4B400000


def as_float(total: jax.Array) -> jax.Array:
    """A sum as float32: a float32 total itself, or an int32 total that began with OFFSET_BITS."""
    if total.dtype != jnp.int32:
        return total
    return jax.lax.bitcast_convert_type(total, jnp.float32) - OFFSET
