"""Operations on float32 tiles, in PTX where Triton makes many instructions of what could be one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import backend


class Arithmetic(NamedTuple):
    """The same operations for kernels and for their interpretation as plain JAX.

    multiply_add(a, b, c): a · b + c, broadcast. narrow(x, dtype): float32 in 16 bits.
    """

    multiply_add: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    exp2: Callable[[jax.Array], jax.Array]
    reciprocal: Callable[[jax.Array], jax.Array]
    narrow: Callable[[jax.Array, jax.typing.DTypeLike], jax.Array]


PTX = Arithmetic(backend.multiply_add, backend.exp2, backend.reciprocal, backend.narrow)
PLAIN = Arithmetic(
    lambda a, b, c: a * b + c, jnp.exp2, lambda x: 1 / x, lambda x, dtype: x.astype(dtype)
)


def times_power(x: jax.Array, exponent: int) -> jax.Array:
    """The product x · 2**exponent, also where the power itself is beyond float32's range."""
    half = exponent // 2
    return x * 2.0**half * 2.0 ** (exponent - half) if exponent else x
