"""TurboMind's quantisation of keys and values, in functions that kernels and references share."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mpjax.kernels.target import current_target

# The scale if all values (a token's channels, or a channel's tokens) are equal. It is small because
# attention multiplies by scales and adds zeros separately, where a large scale would cost other
# values precision: in float16, in softmax weights times other tokens' scales, and in sums with a
# channel's scale (attention/queries.py).
FLAT_STEP = 2.0**-14


def parameter_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """The 16-bit dtype of scales and zeros for values of `dtype`."""
    return jnp.dtype(jnp.bfloat16 if jnp.dtype(dtype) == jnp.bfloat16 else jnp.float16)


def parameters(
    low: jax.Array, high: jax.Array, bits: int, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Scales and zeros for float32 minima and maxima, in float32 but rounded to `dtype`.

    An empty range, `low` = `high`, has the scale FLAT_STEP, because a scale of 0 would make codes
    NaN. For float16, minima and maxima are clamped to its range.
    """
    if jnp.dtype(dtype) == jnp.float16:
        end = float(jnp.finfo(dtype).max)
        low, high = jnp.clip(low, -end, end), jnp.clip(high, -end, end)
    # Not a division by a constant: XLA replaces it by this product, but in a kernel Triton would
    # divide, and the results would differ.
    round_to = current_target().round_to
    scale = round_to((high - low) * (1 / (2**bits - 1)), dtype)
    return jnp.where(scale == 0, FLAT_STEP, scale), round_to(low, dtype)


def encode(values: jax.Array, scale: jax.Array, zero: jax.Array, bits: int) -> jax.Array:
    """int32 codes of float32 values, for the *stored* scale and zero.

    scale, zero: float32 values that were rounded to 16 bits, broadcastable to the values. Their
        rounding adds an error only to values at an end of the range that it leaves uncovered.
    """
    top = 2**bits - 1
    # One division for each scale. XLA would rewrite a division of all values in this way, but a
    # kernel would not.
    halves = (values - zero) * current_target().divide(jnp.full_like(scale, 2.0), scale)
    # Rounds half up in integers. Adding 0.5 to the product may or may not be fused with it, which
    # would change the result.
    return (jnp.clip(halves, 0.0, 2.0 * top).astype(jnp.int32) + 1) >> 1


def encode_symmetric(values: jax.Array, scale: jax.Array, bits: int) -> jax.Array:
    """int32 codes of float32 values, symmetric around 2**(bits − 1); the code 0 is not used.

    Rounds to the nearest, halves up, and clips. scale: float32, broadcastable to the values.
    """
    centre = 2 ** (bits - 1)
    halves = values * current_target().divide(jnp.full_like(scale, 2.0), scale)
    halves = jnp.floor(jnp.clip(halves, -2.0 * (centre - 1), 2.0 * (centre - 1)))
    return ((halves.astype(jnp.int32) + 1) >> 1) + centre
