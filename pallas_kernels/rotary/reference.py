"""The reference of QK-norm and the rotary embedding, in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mpjax.kernels.batch import Span
from mpjax.kernels.kv_cache import hadamard
from mpjax.kernels.kv_cache import reference as kv_cache
from mpjax.kernels.kv_cache.cache import KVPages
from mpjax.kernels.optimized_once import optimized_once
from mpjax.kernels.rotary.rotation import Rotation
from mpjax.kernels.rounding import narrow
from mpjax.kernels.rowwise.reference import rms_norm


@optimized_once()
def rotate(x: jax.Array, cosines: jax.Array, sines: jax.Array) -> jax.Array:
    """The rotary embedding of x; arguments and result as for api.rotate."""
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
    cosines, sines = cosines[:, :, None, None], sines[:, :, None, None]
    # (a, b) → (a · cos − b · sin, b · cos + a · sin). XLA fuses a reversal. It doesn't fuse a
    # concatenation, and would compile a separate kernel for it in each layer.
    signs = jnp.array([-1.0, 1.0], jnp.float32).reshape(1, 1, 1, 2, 1)
    turned = halves * cosines + jnp.flip(halves, -2) * (signs * sines)
    return narrow(turned.reshape(x.shape), x.dtype)


def split_heads(product: jax.Array, rotation: Rotation) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values [batch, tokens, heads, head dim], normalised, before rotation.

    product: [batch, tokens, heads · head dim], of all heads that the rotation's terms have.
    """
    (queries, keys), norms, total = rotation.heads, rotation.norms, rotation.total
    parts = product.reshape(*product.shape[:2], total, product.shape[-1] // total)
    query, key, *rest = jnp.split(parts, [*range(queries, total, keys)], axis=2)
    value = rest[0] if rest else key
    if norms is not None:

        def normed(x: jax.Array, weight: jax.Array) -> jax.Array:
            return narrow(rms_norm(x, weight, norms.epsilon), product.dtype)

        query, key = normed(query, norms.query), normed(key, norms.key)
        value = normed(value, jnp.ones_like(norms.key)) if norms.values else value
    return query, key, value


def rotate_and_append(
    terms: jax.Array, pages: KVPages, span: Span, rotation: Rotation, dtype: jnp.dtype
) -> tuple[jax.Array, KVPages]:
    """Queries and pages as returned by api.rotate_and_append, for padded terms."""
    query, key, value = _rotated_heads(terms, rotation, dtype)
    if rotation.transform_queries and pages.format.key_codes.hadamard:
        [transformed] = hadamard.transform_pieces([query], query.shape[-1], dtype)
        query = transformed.astype(dtype)
    return query, kv_cache.append(pages, key, value, span)


@optimized_once("dtype")
def _rotated_heads(
    terms: jax.Array, rotation: Rotation, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries and keys, normalised and rotated, and values, [batch, tokens, heads, head dim]."""
    product = narrow(terms.astype(jnp.float32).sum(0), dtype)
    query, key, value = split_heads(product, rotation)
    query, key = (rotate(x, rotation.cosines, rotation.sines) for x in (query, key))
    return query, key, value
