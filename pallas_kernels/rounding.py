"""Rounding float32 values to a narrower dtype, so that XLA can't leave it out."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp


def narrow(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Float32 x in `dtype`, and rounded to it also where XLA takes it back to float32.

    XLA removes a cast there and back, so that what follows would see more than is stored.
    """
    return round_to(x, dtype).astype(dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def round_to(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The float32 values of `x`, each rounded to the nearest of a floating-point `dtype`.

    What casts there and back compute, and under `jit` do not: XLA removes the pair. Beyond the
    range of a dtype without infinities (e4m3fn) it is not defined. Differentiates as the identity,
    as casts do.
    """
    info = jnp.finfo(dtype)
    exponent_bits = info.nexp
    if info.maxexp > 2 ** (info.nexp - 1):
        # e4m3fn has numbers where reduce_precision has infinities.
        exponent_bits = jnp.finfo(jnp.float32).nexp
    rounded = jax.lax.reduce_precision(x, exponent_bits, info.nmant)
    if info.nexp == jnp.finfo(jnp.float32).nexp:  # bfloat16, or float32 itself
        return rounded
    # reduce_precision flushes subnormals, which the scales of small values need, to zero.
    spacing = float(info.smallest_subnormal)
    subnormal = jnp.round(x / spacing) * spacing
    return jnp.where(jnp.abs(x) < float(info.smallest_normal), subnormal, rounded)


@round_to.defjvp
def _(dtype: jax.typing.DTypeLike, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return round_to(*primals, dtype), tangents[0]
