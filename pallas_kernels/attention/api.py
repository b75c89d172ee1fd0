"""Attention over the paged cache, and over a prompt that is not cached yet."""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.attention import reference, triton, tuning
from pallas_kernels.kv_cache.api import why_not_triton
from pallas_kernels.kv_cache.cache import KVPages


def paged_attention(
    queries: jax.Array,
    pages: KVPages,
    block_tables: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    implementation: Literal["triton", "reference"] | None = None,
) -> jax.Array:
    """Causal attention of new tokens over a cache that already holds them.

    queries: [batch, tokens, query heads, head dim], token t of sequence b at position
        starts[b] + t. Query heads are a multiple of the pages' KV heads (GQA, MQA, MHA).
    pages, block_tables: one layer of the cache, after `append`.
    starts, counts: int32 [batch], as given to `append`: starts[b] + counts[b] keys count, and
        rows past counts[b] are padding whose output means nothing.
    scale: of the scores; 1/√(head dim) by default.
    window: how many keys a query sees, itself included (sliding window); None for all.

    Returns [batch, tokens, query heads, head dim] in the dtype of the queries. On the GPU each
    cached byte is read once for all query heads of its group; long sequences are split over
    programs (FlashDecoding). Raises ValueError for shapes that don't fit, and UnsupportedError,
    with the reason, where a forced implementation can't run.
    """
    _check_heads(queries, pages.keys.shape[1], pages.head_dim)
    if queries.size == 0:
        return jnp.zeros_like(queries)
    scale = scale if scale is not None else 1 / math.sqrt(pages.head_dim)
    if implementation is None:
        implementation = "triton"
        if reason := _why_not_triton(queries, pages):
            backend.warn_of_reference("paged_attention", reason)
            implementation = "reference"
    arguments = (queries, pages, block_tables, starts, counts)
    if implementation == "reference":
        return reference.paged_attention(*arguments, scale=scale, window=window)
    if implementation != "triton":
        raise ValueError(
            f"paged_attention: unknown implementation {implementation!r}: "
            "expected triton or reference"
        )
    if reason := _why_not_triton(queries, pages):
        raise backend.UnsupportedError(f"paged_attention: 'triton' can't run: {reason}")
    batch, tokens, heads, _ = queries.shape
    kv_heads = pages.keys.shape[1]
    rows = tokens * heads // kv_heads
    config = tuning.configure(batch, kv_heads, rows, block_tables.shape[1], pages.format)
    return triton.paged_attention(*arguments, config, scale=scale, window=window)


def prefill_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    implementation: Literal["cudnn", "xla", "reference"] | None = None,
) -> jax.Array:
    """Causal attention of prompts over themselves, from position 0, in 16 bits or more.

    queries: [batch, tokens, query heads, head dim]; keys, values: the same with KV heads. Prompts
    are padded on the right: causality keeps padding out of every real token.

    On a GPU, 16-bit inputs with a head dimension that is a multiple of 8 up to 128 go to cuDNN's
    flash attention; the rest, with a warning, to XLA. Returns the shape and dtype of the queries.
    """
    _check_heads(queries, keys.shape[2], keys.shape[3])
    scale = scale if scale is not None else 1 / math.sqrt(queries.shape[-1])
    if window is not None and window >= queries.shape[1]:
        window = None  # wider than the prompt: no different, and faster
    if implementation is None:
        implementation = _choose_prefill(queries)
    if implementation == "reference":
        batch, tokens = queries.shape[:2]
        positions = jnp.broadcast_to(jnp.arange(tokens), (batch, tokens))
        lengths = jnp.full((batch,), tokens, jnp.int32)
        return reference.attention(
            queries, keys, values, positions, lengths, scale=scale, window=window
        )
    if implementation not in ("cudnn", "xla"):
        raise ValueError(
            f"prefill_attention: unknown implementation {implementation!r}: "
            "expected cudnn, xla or reference"
        )
    with jax.numpy_dtype_promotion("standard"):  # its XLA implementation relies on promotion
        return jax.nn.dot_product_attention(
            queries,
            keys,
            values,
            scale=scale,
            is_causal=True,
            local_window_size=None if window is None else (window - 1, 0),
            implementation=implementation,
        )


def _choose_prefill(queries: jax.Array) -> Literal["cudnn", "xla", "reference"]:
    if not backend.on_gpu():
        return "reference"
    dim = queries.shape[-1]
    if queries.dtype in (jnp.bfloat16, jnp.float16) and dim <= 128 and dim % 8 == 0:
        return "cudnn"
    reason = f"cuDNN takes 16-bit heads of a multiple of 8 up to 128, not {queries.dtype} of {dim}"
    backend.warn_of_reference("prefill_attention", reason)
    return "xla"


def _why_not_triton(queries: jax.Array, pages: KVPages) -> str | None:
    if queries.dtype not in (jnp.bfloat16, jnp.float16):
        return f"queries are {queries.dtype}, expected bfloat16 or float16"
    return why_not_triton(pages)


def _check_heads(queries: jax.Array, kv_heads: int, head_dim: int) -> None:
    if queries.ndim != 4 or queries.shape[2] % kv_heads or queries.shape[3] != head_dim:
        raise ValueError(
            f"attention: queries of shape {queries.shape} must be [batch, tokens, query heads, "
            f"{head_dim}] with query heads a multiple of the {kv_heads} KV heads"
        )
