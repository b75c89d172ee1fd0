"""Static scales of a model's KV cache, from a checkpoint or a calibration."""

from __future__ import annotations

import warnings

import jax
from flax import nnx

from mpjax.kernels import KVFormat
from mpjax.kernels.checks import as_array


class CacheScales(nnx.Variable):
    """Static scales of keys and values in a cache; not trainable."""


def scales_for(scales: CacheScales | None, format: KVFormat) -> jax.Array | None:
    """The model's cache scales if the KV format uses static scales, else None."""
    if scales is None:
        return None
    found = as_array("cache_scales", scales.get_value())
    if found.ndim == {"head": 3, "static": 4}.get(format.scaling or ""):
        return found
    if format.scaling == "head":
        warnings.warn(
            f"the model's cache_scales are for channels, and {format} has scales of heads, "
            f"which are 1 now: measure them with mpjax.calibrate_cache for {format}",
            stacklevel=4,
        )
    return None
