"""The scales that formats are given, measured on keys and values."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mpjax.kernels.arithmetic import largest_magnitude
from mpjax.kernels.checks import as_array
from mpjax.kernels.codes import float8
from mpjax.kernels.kv_cache.formats import KVFormat

LARGEST_CODE = 127  # of 8s, on either side of zero
# Smaller scales are subnormal: they may be flushed to zero, and their reciprocals overflow.
LEAST_SCALE = float(jnp.finfo(jnp.float32).tiny)


def cache_scales(x: jax.Array, format: KVFormat | str) -> jax.Array:
    """Scales with which the largest of x still is a code: max|x| over the largest code.

    x: keys (after the rotary embedding) or values [..., KV heads, head dim], of as many tokens as
        tell how large others will be; what is larger is rounded to the largest code.
    format: with 8s, whose scales are of channels, or FP8, whose scales are of heads: a KVFormat, or
        what KVFormat.parse reads, such as "KV8s".

    Returns float32 [KV heads, head dim] or [KV heads], 1 where all of x is zero or too small for a
    scale, NaN where any of x is NaN or infinite: for keys and values of a layer what
    `PagedKVCache.create` takes stacked. Raises ValueError for formats that are given no scales.
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
