"""Round-to-nearest quantisation of a weight matrix into any packed format."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.formats import QuantizedTensor, WeightFormat, pack
from pallas_kernels.rounding import round_to


@functools.partial(jax.jit, static_argnames="format")
def quantize(weight: jax.Array, format: WeightFormat) -> QuantizedTensor | jax.Array:
    """Rounds `weight` [K, N] to the nearest codes of `format`; a 16-bit format just casts.

    Per group of input channels, asymmetric: scale = (max − min) / (2**b − 1) over a range that
    includes zero, zero point = round(−min / scale); symmetric: scale = 2·max|w| / (2**b − 1), zero
    point 2**(b − 1), as GPTQ's quantiser. Codes are rounded with the float16 scale that is stored,
    so its own rounding costs nothing but at the ends of a range. A group of zeros stays zero.

    Raises ValueError where K is not a multiple of the group size.
    """
    if weight.ndim != 2:
        raise ValueError(f"quantize expects a matrix [K, N], got shape {weight.shape}")
    if not format.is_packed:
        return weight.astype(format.codes)
    channels, outputs = weight.shape
    size = format.group_size or channels
    if channels % size:
        raise ValueError(
            f"{channels} input channels can't be split into groups of {size}; "
            "choose a group size that divides them, or gK for one group"
        )
    groups = weight.astype(jnp.float32).reshape(-1, size, outputs)
    top = 2**format.bits - 1
    low = jnp.minimum(groups.min(1), 0.0)
    high = jnp.maximum(groups.max(1), 0.0)
    if format.symmetric:
        high = jnp.maximum(-low, high)
        low = -high
    # Products in the place of divisions, as XLA would have them anyway.
    steps = round_to((high - low) * (1 / top), jnp.float16)
    steps = jnp.where(steps == 0, 1.0, steps)
    inverse = 1 / steps
    if format.symmetric:
        zeros = jnp.full_like(steps, 2 ** (format.bits - 1))
    else:
        zeros = jnp.clip(jnp.round(-low * inverse), 0, top)
    codes = jnp.clip(jnp.round(groups * inverse[:, None]) + zeros[:, None], 0, top)
    codes = codes.reshape(weight.shape).astype(jnp.uint8)
    return pack(codes, steps.astype(jnp.float16), zeros, format)
