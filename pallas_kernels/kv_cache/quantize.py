"""TurboMind's KV quantisation, as functions of jnp values that kernel and reference share."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mpjax.kernels.target import current_target

# The step of what is all alike, a token's channels or a channel's tokens. Attention multiplies by
# steps apart from zeros, and beside a large one loses both: weights times other tokens' steps in
# float16, and to rounding what a channel's step is worth (attention/queries.py).
FLAT_STEP = 2.0**-14


def parameter_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """The 16-bit dtype of scales and zeros beside values of `dtype`."""
    return jnp.dtype(jnp.bfloat16 if jnp.dtype(dtype) == jnp.bfloat16 else jnp.float16)


def parameters(
    low: jax.Array, high: jax.Array, bits: int, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Scale and zero for float32 minima and maxima: float32, but exact in `dtype`.

    A range of zero has FLAT_STEP as its scale: zero would make NaN of its codes. What is beyond
    float16 counts as its end.
    """
    if jnp.dtype(dtype) == jnp.float16:
        end = float(jnp.finfo(dtype).max)
        low, high = jnp.clip(low, -end, end), jnp.clip(high, -end, end)
    # Not a division: XLA makes one by a constant a product like this, and a kernel would not.
    round_to = current_target().round_to
    scale = round_to((high - low) * (1 / (2**bits - 1)), dtype)
    return jnp.where(scale == 0, FLAT_STEP, scale), round_to(low, dtype)


def encode(values: jax.Array, scale: jax.Array, zero: jax.Array, bits: int) -> jax.Array:
    """Codes, as int32, of float32 values against the *stored* scale and zero.

    scale, zero: float32, of a shape that broadcasts to that of the values. Their rounding to 16
    bits adds an error only where it leaves an end of the range uncovered.
    """
    top = 2**bits - 1
    # One division for each scale, spelled out: XLA would put a product in the place of many.
    halves = (values - zero) * current_target().divide(jnp.full_like(scale, 2.0), scale)
    # Rounds half up, in integers: 0.5 added to the product may fuse with it, or not.
    return (jnp.clip(halves, 0.0, 2.0 * top).astype(jnp.int32) + 1) >> 1


def encode_symmetric(values: jax.Array, scale: jax.Array, bits: int) -> jax.Array:
    """Codes around 2**(bits − 1), as int32, of float32 values; the lowest code is not used."""
    centre = 2 ** (bits - 1)
    halves = values * current_target().divide(jnp.full_like(scale, 2.0), scale)
    halves = jnp.floor(jnp.clip(halves, -2.0 * (centre - 1), 2.0 * (centre - 1)))
    return ((halves.astype(jnp.int32) + 1) >> 1) + centre
