"""Both products of adapters by the grouped product, with adapters in the role of experts."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from mpjax.kernels.experts.api import grouped_matmul
from mpjax.kernels.experts.local import LocalExperts


def shrink(x: jax.Array, down: jax.Array, adapters: jax.Array) -> jax.Array:
    """The products float32 [rows, maps · rank] of x [rows, K] and each row's `down`."""
    return product(x, down, adapters[:, None])[:, 0]


def expand(
    terms: jax.Array, inner: jax.Array, ups: Sequence[jax.Array], adapters: jax.Array
) -> jax.Array:
    """The terms [splits, rows, N], the first of which includes the products with `ups`.

    inner: [parts, rows, maps · rank], whose sum over the first axis is multiplied by `ups`.
    """
    has_one = (adapters > 0)[:, None]  # kernels leave other rows undefined
    parts = jnp.split(jnp.where(has_one, inner.sum(0), 0), len(ups), -1)
    changes = [
        product(part.astype(up.dtype), up, adapters[:, None])[:, 0]
        for part, up in zip(parts, ups, strict=True)
    ]
    first = terms[0].astype(jnp.float32) + jnp.concatenate(changes, -1)
    return jnp.concatenate([first.astype(terms.dtype)[None], terms[1:]])


def product(x: jax.Array, stack: jax.Array, adapters: jax.Array) -> jax.Array:
    """Products float32 [..., k, N] of x [..., K] or [..., k, K] and k matrices of a stack.

    adapters: int32 [..., k], indices of matrices from 1; 0 for a product of zeros. The grouped
    product runs as a kernel if one can, else as a loop over the stack.
    """
    numbers = adapters - 1
    found = grouped_matmul(x, stack.astype(x.dtype), LocalExperts(numbers))
    # The grouped product leaves rows without an entry undefined.
    return jnp.where((numbers >= 0)[..., None], found, jnp.zeros_like(found)).astype(jnp.float32)
