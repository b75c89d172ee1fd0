"""Rounding float32 values to a 16-bit dtype without leaving float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def round_to(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The float32 values of `x`, each rounded to the nearest of `dtype` (bfloat16 or float16).

    What casts there and back compute, and under `jit` do not: XLA removes the pair.
    """
    info = jnp.finfo(dtype)
    rounded = jax.lax.reduce_precision(x, info.nexp, info.nmant)
    if info.nexp == jnp.finfo(jnp.float32).nexp:
        return rounded
    # reduce_precision flushes float16's subnormals, which the scales of small values need, to zero.
    spacing = float(info.smallest_subnormal)
    subnormal = jnp.round(x / spacing) * spacing
    return jnp.where(jnp.abs(x) < float(info.smallest_normal), subnormal, rounded)
