"""Calibration of scales for formats with static scales."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mpjax.kernels.arithmetic import largest_magnitude
from mpjax.kernels.checks import as_array
from mpjax.kernels.codes import float8
from mpjax.kernels.kv_cache.formats import KVFormat

LARGEST_CODE = 127  # of the kind 8s: codes are −127 … 127
# Smaller scales are subnormal: they may be flushed to zero, and their reciprocals overflow.
LEAST_SCALE = float(jnp.finfo(jnp.float32).tiny)


def cache_scales(x: jax.Array, format: KVFormat | str) -> jax.Array:
    """Static scales for keys or values like x: max|x| over the largest code.

    x: keys (after the rotary embedding) or values [..., KV heads, head dim] of enough tokens to be
        representative. Larger values of other tokens will be clamped to the largest code.
    format: a KVFormat, or a string that KVFormat.parse accepts, such as "KV8s". Scales belong to
        channels for 8s, to heads for FP8.

    Returns float32 [KV heads, head dim] for 8s, [KV heads] for FP8. A scale is 1 if all of its
    values are zero or too small for a normal float32, and NaN if any value is NaN or infinite.
    `PagedKVCache.create` takes the stacked scales of keys and values of all layers.

    Raises ValueError for a format without static scales, and for x of another rank or without
    tokens.
    """
    x, format = as_array("cache_scales: x", x), KVFormat.of(format)
    if format.scaling is None:
        raise ValueError(f"{format} is given no scales: KV8s and KVfp8 are")
    if x.ndim < 2 or x.size == 0:
        raise ValueError(
            f"cache_scales: x has shape {x.shape}: expected [..., KV heads, head dim] with one "
            "token or more"
        )
    is_static = format.scaling == "static"
    axes = tuple(range(x.ndim - 2)) + (() if is_static else (x.ndim - 1,))
    reach = LARGEST_CODE if is_static else float8.LARGEST
    scales = largest_magnitude(x.astype(jnp.float32), axes) / reach
    return jnp.where(scales < LEAST_SCALE, 1.0, scales)
