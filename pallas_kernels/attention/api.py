"""The public functions of attention: over the paged cache, and over prompts without a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels import device
from mpjax.kernels.activation_blocks import ActivationBlocks
from mpjax.kernels.activations import QuantizedActivations
from mpjax.kernels.attention import cudnn, plans, reference, token_by_token, triton
from mpjax.kernels.attention.rounding import can_round
from mpjax.kernels.batch import Span
from mpjax.kernels.checks import as_array, as_arrays, require_floats, require_type
from mpjax.kernels.implementation import choose, warn, warn_of_reference
from mpjax.kernels.invariance import is_batch_invariant
from mpjax.kernels.kv_cache import hadamard
from mpjax.kernels.kv_cache.api import read_span, require_pages, why_not_triton
from mpjax.kernels.kv_cache.cache import KVPages
from mpjax.kernels.kv_cache.formats import KVFormat
from mpjax.kernels.kv_cache.layout import PAGE_SIZES
from mpjax.kernels.masks import CAUSAL, Masks
from mpjax.kernels.rowwise.api import quantize_rows

# The most tokens of a page into which `prefill_attention` copies keys and values.
PREFILL_PAGE_SIZE = 128
BLOCKS = (
    "a token attends to its own block in 16 bits or to its codes, by the tokens that come with it"
)


@overload
def paged_attention(
    queries: jax.Array,
    pages: KVPages,
    span: Span,
    masks: Masks = ...,
    *,
    transformed: bool = ...,
    blocks: None = None,
    implementation: Literal["triton", "cudnn", "reference"] | None = ...,
) -> jax.Array: ...


@overload
def paged_attention(
    queries: jax.Array,
    pages: KVPages,
    span: Span,
    masks: Masks = ...,
    *,
    transformed: bool = ...,
    blocks: ActivationBlocks,
    implementation: Literal["triton", "cudnn", "reference"] | None = ...,
) -> QuantizedActivations: ...


def paged_attention(
    queries: jax.Array,
    pages: KVPages,
    span: Span,
    masks: Masks = CAUSAL,
    *,
    transformed: bool = False,
    blocks: ActivationBlocks | None = None,
    implementation: Literal["triton", "cudnn", "reference"] | None = None,
) -> jax.Array | QuantizedActivations:
    """Causal attention of new tokens over a cache that already has their keys and values.

    queries: [batch, tokens, query heads, head dim], token t of sequence b at position
        starts[b] + t; or varlen, [tokens, query heads, head dim]. The number of query heads is a
        multiple of the pages' KV heads (GQA, MQA, MHA).
    pages: one layer of the cache, after `append`. In a format with blocks, if the new tokens cross
        the end of a block, all of them attend to that block's codes, even the block's own tokens;
        tokens that come one at a time attend to their own block in 16 bits.
    span: the positions of the new tokens, as given to `append`. Sequence b has
        starts[b] + counts[b] keys. The outputs of padding tokens are undefined. Slots after a
        sequence's last key, in the pages of its block table, must have finite values (KVPages).
    masks: the scale, window, softcap and sinks of the scores.
    transformed: whether the queries have already been through the Hadamard transform of the pages'
        keys, as `rotate_and_append` returns them with Rotation.transform_queries; otherwise this
        function transforms them. No effect on formats without a transform.
    blocks: the activation blocks of the next weight, if the result is to be rounded to 4 and 8
        bits. If heads have 128 channels or a multiple, in their own order, rounding is fused into
        the kernel that joins a sequence's programs, or for heads of 128 into a program that has a
        sequence alone. Otherwise it takes another kernel.

    Returns an array of the shape and dtype of the queries, or with blocks QuantizedActivations
    [batch, tokens, query heads · head dim], varlen without the first axis. On the GPU each cached
    byte is read once for all query heads of its KV head; long sequences are split over programs
    (FlashDecoding). If many tokens are new and causality is the only mask, the cache is dequantised
    to 16 bits for cuDNN (`attention.cudnn`), up to 1 GiB of keys and values, if the installed JAX
    has the function for it. For pages with scales, the kernel takes queries of
    KVPages.parameter_dtype; queries of other dtypes go to the reference, with a warning. In
    float16, scores may reach 2**24, and so may sums of queries times zeros of channels.

    Raises ValueError for shapes and values that don't fit (starts and counts are checked as in
    `append`), and UnsupportedError, with the reason, if a forced implementation can't run.
    """
    require_pages("paged_attention", pages)
    queries = _read_queries(queries, (3, 4), pages.keys.shape[1], pages.head_dim)
    require_type("paged_attention: transformed", transformed, bool, np.bool)
    masks = _read_masks("paged_attention", masks, queries)
    span = read_span("paged_attention", span, pages, queries.shape[:-2])
    blocks = _read_blocks(blocks, queries.shape[-2] * pages.head_dim)
    if queries.size == 0:
        return _rounded(jnp.zeros_like(queries), blocks)
    implementation = _choose_paged(queries, pages, span, masks, implementation)
    if implementation == "reference":
        module = token_by_token if is_batch_invariant() else reference
        found = module.paged_attention(queries, pages, span, masks, transformed=transformed)
        return _rounded(found, blocks, "reference")
    if pages.format.key_codes.hadamard and not transformed:
        queries = hadamard.transform(queries)
    if implementation == "cudnn":
        found = cudnn.paged_attention(queries, pages, span, scale=masks.scale_for(pages.head_dim))
        return _rounded(found, blocks)
    return _by_triton(queries, pages, span, masks, blocks)


def _read_blocks(blocks: Any, channels: int) -> ActivationBlocks | None:
    if blocks is None:
        return None
    require_type("paged_attention: blocks", blocks, ActivationBlocks)
    return blocks.checked("paged_attention", channels)


def _by_triton(
    queries: jax.Array, pages: KVPages, span: Span, masks: Masks, blocks: ActivationBlocks | None
) -> jax.Array | QuantizedActivations:
    rows = queries.shape[-3] * queries.shape[-2] // pages.keys.shape[1]
    shape, is_varlen = span.block_tables.shape, queries.ndim == 3
    config = plans.config_of(plans.Problem.of(rows, pages, shape, is_varlen=is_varlen))
    in_kernel = blocks if blocks is not None and can_round(blocks, pages.head_dim) else None
    result = triton.paged_attention(queries, pages, span, masks, config, blocks=in_kernel)
    return result if isinstance(result, QuantizedActivations) else _rounded(result, blocks)


def _choose_paged(
    queries: jax.Array, pages: KVPages, span: Span, masks: Masks, implementation: str | None
) -> Literal["triton", "cudnn", "reference"]:
    why_not_cudnn = cudnn.why_not(queries, pages, span)
    if not masks.is_causal:
        why_not_cudnn = "it knows no window, softcap or sinks"
    if is_batch_invariant():
        why_not_cudnn = "a batch-invariant call needs the tiles of the fused kernel"
        if pages.format.block is not None:
            raise device.UnsupportedError(
                f"paged_attention: {pages.format} can't be batch invariant: {BLOCKS}"
            )
    is_long = queries.shape[-3] >= cudnn.LEAST_TOKENS and not is_batch_invariant()
    default = "cudnn" if is_long and why_not_cudnn is None else "triton"
    is_never = why_not_cudnn is not None and why_not_cudnn == cudnn.why_never()
    if implementation is None and is_long and is_never and device.on_gpu():
        warn(f"long prompts over a cache take longer: {why_not_cudnn}")
    return choose(
        "paged_attention",
        implementation,
        default,
        ("triton", "cudnn", "reference"),
        lambda name: why_not_cudnn if name == "cudnn" else _why_not_triton(queries, pages),
    )


def _rounded(
    x: Any, blocks: ActivationBlocks | None, implementation: Literal["reference"] | None = None
) -> jax.Array | QuantizedActivations:
    """Outputs [..., heads, head dim] unchanged, or with blocks rounded [..., heads · head dim]."""
    if blocks is None:
        found: jax.Array = x
        return found
    flat = x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])
    return quantize_rows(flat, blocks, implementation=implementation)


def prefill_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    masks: Masks = CAUSAL,
    *,
    implementation: Literal["cudnn", "triton", "xla", "reference"] | None = None,
) -> jax.Array:
    """Causal attention of prompts over themselves, from position 0, in 16 bits or more.

    queries: [batch, tokens, query heads, head dim].
    keys, values: [batch, tokens, KV heads, head dim]. Prompts are padded on the right, so that
        causality hides padding from every real token.
    masks: the scale, window, softcap and sinks of the scores.

    On a GPU, 16-bit inputs with a head dimension that is a multiple of 8 up to 128 go to cuDNN's
    flash attention. cuDNN has no softcap, and returns softmax sums in 16 bits, which is too
    imprecise to add a sink later: calls with a softcap or sinks, and heads of 256, go to the kernel
    of `paged_attention`, over keys and values copied into pages. All other calls go, with a
    warning, to XLA, or with a softcap or sinks to the reference.

    Returns an array of the shape and dtype of the queries. Raises ValueError for shapes and values
    that don't fit, and UnsupportedError, with the reason, if a forced implementation can't run.
    """
    queries, keys, values = as_arrays("attention", queries=queries, keys=keys, values=values)
    require_floats("attention", queries=queries, keys=keys, values=values)
    if keys.ndim != 4 or keys.shape != values.shape or keys.shape[:2] != queries.shape[:2]:
        raise ValueError(
            f"attention: keys of shape {keys.shape} and values of shape {values.shape} must be "
            f"[batch, tokens, KV heads, head dim], of as many tokens as queries {queries.shape}"
        )
    queries = _read_queries(queries, (4,), keys.shape[2], keys.shape[3])
    masks = _read_masks("prefill_attention", masks, queries)
    if queries.size == 0:
        return jnp.zeros_like(queries)
    if masks.window is not None and masks.window >= queries.shape[1]:
        masks = dataclasses.replace(masks, window=None, chunked=False)  # it would hide no key

    def why_not(name: str) -> str | None:
        if name == "triton":
            return _why_not_triton(queries, jax.eval_shape(_as_pages, keys, values)[0])
        if masks.softcap is not None or masks.sinks is not None:
            return "it has no softcap and no sinks"
        if len({queries.dtype, keys.dtype, values.dtype}) > 1:
            dtypes = f"{queries.dtype}, {keys.dtype} and {values.dtype}"
            return f"queries, keys and values are {dtypes}, expected one dtype"
        return cudnn.why_not_cudnn(queries) if name == "cudnn" else None

    implementation = choose(
        "prefill_attention",
        _choose_prefill(why_not) if implementation is None else implementation,
        "reference",
        ("cudnn", "triton", "xla", "reference"),
        why_not,
    )
    return _prefill(implementation, queries, keys, values, masks)


def _prefill(
    implementation: Literal["cudnn", "triton", "xla", "reference"],
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    masks: Masks,
) -> jax.Array:
    batch, tokens = queries.shape[:2]
    if implementation == "reference":
        positions = jnp.broadcast_to(jnp.arange(tokens), (batch, tokens))
        lengths = jnp.full((batch,), tokens, jnp.int32)
        return reference.attention(queries, keys, values, positions, lengths, masks)
    if implementation == "triton":
        pages, block_tables = _as_pages(keys, values)
        starts, counts = (jnp.full((batch,), n, jnp.int32) for n in (0, tokens))
        span = Span(block_tables, starts, counts, fresh=True)
        return paged_attention(queries, pages, span, masks, implementation="triton")
    if masks.chunked and masks.window is not None:  # each chunk is a sequence of its own
        chunks, size = -(-tokens // masks.window), masks.window
        whole = dataclasses.replace(masks, window=None, chunked=False)
        padding = [(0, 0), (0, chunks * size - tokens), (0, 0), (0, 0)]
        query, key, value = (
            jnp.pad(x, padding).reshape(batch * chunks, size, *x.shape[2:])
            for x in (queries, keys, values)
        )
        found = _prefill(implementation, query, key, value, whole)
        return found.reshape(batch, chunks * size, *queries.shape[2:])[:, :tokens]
    if implementation == "cudnn" and tokens % 2:  # for which JAX 0.11 has no derivatives
        one = [(0, 0), (0, 1), (0, 0), (0, 0)]
        query, key, value = (jnp.pad(x, one) for x in (queries, keys, values))
        return _prefill(implementation, query, key, value, masks)[:, :tokens]
    with jax.numpy_dtype_promotion("standard"):  # its XLA implementation relies on promotion
        return jax.nn.dot_product_attention(
            queries,
            keys,
            values,
            scale=masks.scale_for(queries.shape[3]),
            is_causal=True,
            local_window_size=None if masks.window is None else (masks.window - 1, 0),
            implementation=implementation,
        )


def _choose_prefill(
    why_not: Callable[[str], str | None],
) -> Literal["cudnn", "triton", "xla", "reference"]:
    if not device.on_gpu():
        return "reference"
    if (cudnn_reason := why_not("cudnn")) is None:
        return "cudnn"
    if (triton_reason := why_not("triton")) is None:
        return "triton"
    warn_of_reference("prefill_attention", f"of cuDNN, {cudnn_reason}; of Triton, {triton_reason}")
    return "xla" if why_not("xla") is None else "reference"


def _as_pages(keys: jax.Array, values: jax.Array) -> tuple[KVPages, jax.Array]:
    """Copies keys and values [batch, tokens, KV heads, head dim] into KV16 pages.

    Returns the pages, and block tables int32 [batch, pages per sequence].
    """
    batch, tokens, heads, dim = keys.shape
    size = min(PREFILL_PAGE_SIZE, max(min(PAGE_SIZES), 1 << (tokens - 1).bit_length()))
    count = -(-tokens // size)

    def paged(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, count * size - tokens), (0, 0), (0, 0)))
        x = x.reshape(batch, count, size, heads, dim).swapaxes(2, 3)
        return x.reshape(batch * count, heads, size, dim)

    block_tables = jnp.arange(batch * count, dtype=jnp.int32).reshape(batch, count)
    return KVPages(paged(keys), paged(values), None, None, KVFormat()), block_tables


def _why_not_triton(queries: jax.Array, pages: KVPages) -> str | None:
    if queries.dtype not in (jnp.bfloat16, jnp.float16):
        return f"queries are {queries.dtype}, expected bfloat16 or float16"
    if pages.parameter_dtype not in (None, queries.dtype.name):
        return (
            f"the pages are for {pages.parameter_dtype} queries and these are {queries.dtype}: "
            f"create the cache with dtype='{queries.dtype}'"
        )
    return why_not_triton(pages)


def _read_queries(
    queries: jax.Array, ranks: tuple[int, ...], kv_heads: int, head_dim: int
) -> jax.Array:
    queries = as_array("attention: queries", queries)
    require_floats("attention", queries=queries)
    heads, dim = (1, *queries.shape)[-2:] if queries.ndim else (1, 1)
    if queries.ndim not in ranks or heads % kv_heads or dim != head_dim:
        varlen = f", or varlen [tokens, query heads, {head_dim}]," if 3 in ranks else ""
        raise ValueError(
            f"attention: queries of shape {queries.shape} must be [batch, tokens, query heads, "
            f"{head_dim}]{varlen} with query heads a multiple of the {kv_heads} KV heads"
        )
    return queries


def _read_masks(operation: str, masks: Masks, queries: jax.Array) -> Masks:
    require_type(f"{operation}: masks", masks, Masks)
    return masks.read(operation, queries.shape[-2])
