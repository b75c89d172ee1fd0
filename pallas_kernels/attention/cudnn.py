"""Prefill over a long cache by cuDNN, for which the cache is dequantised once.

cuDNN's flash attention is faster than any Triton kernel for the same products. But it can't read
codes, and its causal mask begins at the first key. So XLA dequantises the cache to 16 bits, for
this call. The new tokens attend twice: without a mask to the tokens that were in the cache before,
and causally to one another. The softmax sums join the two results.
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
    # JAX's public function rounds softmax sums to the 16 bits of the queries, which is too coarse
    # to combine the attention over old tokens with that over new ones.
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention
except ImportError:  # pragma: no cover
    dot_product_attention = None  # type: ignore[assignment]

LEAST_TOKENS = 512  # fewer new tokens don't pay for dequantising the cache
MOST_SCRATCH_BYTES = 1 << 30
LEAST_CAPABILITY = 8.0  # compute capability
HEAD_DIM_UNIT, MOST_HEAD_DIM = 8, 128

# A function of queries [batch, tokens, query heads, dim], keys and values [batch, keys, KV heads,
# dim], int32 [batch] (the number of keys for each sequence's queries) or None for a causal mask,
# and the scale. It returns outputs like the queries, and the natural logarithms of softmax sums,
# float32 [batch, tokens, query heads].
Attend = Callable[
    [jax.Array, jax.Array, jax.Array, jax.Array | None, float], tuple[jax.Array, jax.Array]
]


def why_not(queries: jax.Array, pages: KVPages, span: Span) -> str | None:
    """The reason why this module can't attend with these arguments, or None if it can."""
    if queries.ndim != 4:
        return "varlen sequences would see each other"
    if reason := why_never() or why_not_cudnn(queries):
        return reason
    if (needed := scratch_bytes(pages, span)) > MOST_SCRATCH_BYTES:
        return f"the cache would fill {needed} bytes, more than {MOST_SCRATCH_BYTES}"
    return None


def why_never() -> str | None:
    """The reason why this module can't attend with the installed JAX, or None if it can."""
    if dot_product_attention is None:
        return f"JAX {jax.__version__} has no cuDNN attention where it is looked for"
    return None


def why_not_cudnn(queries: jax.Array) -> str | None:
    """The reason why cuDNN can't attend with these queries on this device, or None if it can."""
    if not device.on_gpu():
        return f"the default device is {device.platform()!r}, and cuDNN needs a CUDA GPU"
    if (capability := device.compute_capability() or 0.0) < LEAST_CAPABILITY:
        return f"compute capability {capability} is below {LEAST_CAPABILITY}"
    if queries.dtype not in (jnp.bfloat16, jnp.float16):
        return f"queries are {queries.dtype}, expected bfloat16 or float16"
    if (dim := queries.shape[-1]) > MOST_HEAD_DIM or dim % HEAD_DIM_UNIT:
        return f"heads of {dim} channels are no multiple of {HEAD_DIM_UNIT} up to {MOST_HEAD_DIM}"
    return None


def scratch_bytes(pages: KVPages, span: Span) -> int:
    """Bytes of keys and values in 16 bits, of all pages in the block tables."""
    return 4 * span.block_tables.size * pages.page_size * pages.keys.shape[1] * pages.head_dim


def attend_with_cudnn(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    lengths: jax.Array | None,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """An `Attend`: cuDNN's flash attention."""
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
    attend: Attend = attend_with_cudnn,
) -> jax.Array:
    """Attention over the cache, dequantised to 16 bits; result as for api.paged_attention.

    queries: [batch, tokens, query heads, dim], already transformed if the pages' keys are stored
        after a Hadamard transform.
    scale: of the scores.
    attend: the attention function, replaced in tests.
    """
    dtype, tokens, starts = queries.dtype, queries.shape[1], span.starts
    largest = float(jnp.finfo(dtype).max)
    rows = None if span.residual_pages is None else span.residual_pages[:, 0]
    keys, values = (
        jnp.clip(x, -largest, largest).astype(dtype)
        for x in kv_cache.gather(pages, span.block_tables, span.ends, rows, transformed=True)
    )  # [batch, capacity, KV heads, dim]
    # Only padding has positions beyond the capacity, and no real token attends to its keys.
    place = jnp.minimum(starts[:, None] + jnp.arange(tokens)[None], keys.shape[1] - 1)
    own_keys, own_values = (
        jnp.take_along_axis(x, place[:, :, None, None], 1) for x in (keys, values)
    )
    new, new_sums = attend(queries, own_keys, own_values, None, scale)
    old, old_sums = attend(queries, keys, values, starts, scale)
    share = jax.nn.sigmoid(old_sums - new_sums)[..., None]  # the old tokens' share of the weights
    old, new = (x.astype(jnp.float32) for x in (old, new))
    joined = new + share * (old - new)
    # Without old tokens there is no softmax sum for them, and `old` is undefined.
    return jnp.where(starts[:, None, None, None] > 0, joined, new).astype(dtype)
