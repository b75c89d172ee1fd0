"""Rounds float32 values to a narrower dtype in a way that XLA cannot optimise away."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp


def narrow(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Converts float32 x to `dtype`, so that later conversions to float32 see the rounded values.

    After a plain cast they may not: XLA removes a cast to `dtype` and back, and then a kernel that
    consumes the value sees more precision than is stored.
    """
    return round_to(x, dtype).astype(dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def round_to(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Rounds float32 values to the nearest value of a floating-point `dtype`; returns float32.

    Two casts, to `dtype` and back, would do the same, but under `jit` XLA removes the pair. The
    result is undefined for values beyond the range of a dtype without infinities (float8_e4m3fn).
    The derivative is the identity's, as for casts.
    """
    info = jnp.finfo(dtype)
    exponent_bits = info.nexp
    if info.maxexp > 2 ** (info.nexp - 1):
        # float8_e4m3fn has finite values where reduce_precision would have infinities.
        exponent_bits = jnp.finfo(jnp.float32).nexp
    rounded = jax.lax.reduce_precision(x, exponent_bits, info.nmant)
    if info.nexp == jnp.finfo(jnp.float32).nexp:  # bfloat16, or float32 itself
        return rounded
    # reduce_precision flushes subnormals to zero, but scales of small values are subnormal.
    spacing = float(info.smallest_subnormal)
    subnormal = jnp.round(x / spacing) * spacing
    return jnp.where(jnp.abs(x) < float(info.smallest_normal), subnormal, rounded)


@round_to.defjvp
def _(dtype: jax.typing.DTypeLike, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return round_to(*primals, dtype), tangents[0]
