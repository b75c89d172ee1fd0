"""Attention of many new tokens over a long cache: decode it once, and let cuDNN attend.

cuDNN's flash attention is faster than any kernel that Triton makes of the same products, but it
knows no codes, and its causal mask begins at the first key. So XLA writes the cache out in 16 bits,
for this call; the tokens that were there before, which every new one sees, are one product, the new
ones among themselves a causal one, and their sums join the two.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from mpjax.kernels import device
from mpjax.kernels.batch import Span
from mpjax.kernels.kv_cache import reference as kv_cache
from mpjax.kernels.kv_cache.cache import KVPages

try:
    # JAX's public function rounds these sums to the 16 bits of the queries: too few to join by.
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention
except ImportError:  # pragma: no cover
    dot_product_attention = None  # type: ignore[assignment]

LEAST_TOKENS = 512  # fewer don't pay for writing the cache out
MOST_SCRATCH_BYTES = 1 << 30
LEAST_CAPABILITY = 8.0
CHANNELS_AT_ONCE, MOST_CHANNELS = 8, 128  # of a head

# Queries [batch, tokens, heads, dim], keys and values, how many of these are seen, by sequence, or
# None for causality, and the scale; gives the result and ln of the sums, float32 [batch, tokens,
# heads].
Attend = Callable[
    [jax.Array, jax.Array, jax.Array, jax.Array | None, float], tuple[jax.Array, jax.Array]
]


def why_not(queries: jax.Array, pages: KVPages, span: Span) -> str | None:
    """The reason why queries can't be attended to so, or None if they can."""
    if queries.ndim != 4:
        return "varlen sequences would see each other"
    if reason := why_never() or why_not_cudnn(queries):
        return reason
    if (needed := scratch_bytes(pages, span)) > MOST_SCRATCH_BYTES:
        return f"the cache would fill {needed} bytes, more than {MOST_SCRATCH_BYTES}"
    return None


def why_never() -> str | None:
    """The reason why this JAX can't attend so at all, or None if it can."""
    if dot_product_attention is None:
        return f"JAX {jax.__version__} has no cuDNN attention where it is looked for"
    return None


def why_not_cudnn(queries: jax.Array) -> str | None:
    """The reason why cuDNN can't attend with such queries here, or None if it can."""
    if not device.on_gpu():
        return f"the default device is {device.platform()!r}, and cuDNN needs a CUDA GPU"
    if (capability := device.compute_capability() or 0.0) < LEAST_CAPABILITY:
        return f"compute capability {capability} is below {LEAST_CAPABILITY}"
    if queries.dtype not in (jnp.bfloat16, jnp.float16):
        return f"queries are {queries.dtype}, expected bfloat16 or float16"
    if (dim := queries.shape[-1]) > MOST_CHANNELS or dim % CHANNELS_AT_ONCE:
        return (
            f"heads of {dim} channels are no multiple of {CHANNELS_AT_ONCE} up to {MOST_CHANNELS}"
        )
    return None


def scratch_bytes(pages: KVPages, span: Span) -> int:
    """Bytes of keys and values in 16 bits, of all pages in the tables."""
    return 4 * span.block_tables.size * pages.page_size * pages.keys.shape[1] * pages.head_dim


def cudnn(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    lengths: jax.Array | None,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """`Attend` by cuDNN."""
    tokens = None if lengths is None else jnp.full_like(lengths, queries.shape[1])
    mask = MaskType.CAUSAL if lengths is None else MaskType.PADDING
    out, sums = dot_product_attention(
        *(queries, keys, values, None, None, tokens, lengths),
        scale=scale,
        mask_type=mask,
        return_residual=True,
    )
    return out, sums.swapaxes(1, 2)


def paged_attention(
    queries: jax.Array,
    pages: KVPages,
    span: Span,
    *,
    scale: float,
    attend: Attend = cudnn,
) -> jax.Array:
    """See api.paged_attention; queries are [batch, tokens, query heads, dim].

    They went through the Hadamard transform of the pages' keys, if that is such a format.
    """
    dtype, tokens, starts = queries.dtype, queries.shape[1], span.starts
    largest = float(jnp.finfo(dtype).max)
    keys, values = (
        jnp.clip(x, -largest, largest).astype(dtype)
        for x in kv_cache.gather(pages, span.block_tables, span.ends, transformed=True)
    )  # [batch, capacity, KV heads, dim]
    # Past the capacity are only keys of padding, which no real token sees.
    place = jnp.minimum(starts[:, None] + jnp.arange(tokens)[None], keys.shape[1] - 1)
    own_keys, own_values = (
        jnp.take_along_axis(x, place[:, :, None, None], 1) for x in (keys, values)
    )
    new, new_sums = attend(queries, own_keys, own_values, None, scale)
    old, old_sums = attend(queries, keys, values, starts, scale)
    share = jax.nn.sigmoid(old_sums - new_sums)[..., None]  # of the old ones
    old, new = (x.astype(jnp.float32) for x in (old, new))
    joined = new + share * (old - new)
    # Without keys there is no sum, and the result may be anything.
    return jnp.where(starts[:, None, None, None] > 0, joined, new).astype(dtype)
