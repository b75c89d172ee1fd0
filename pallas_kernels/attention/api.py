"""Attention over the paged cache, and over a prompt that is not cached yet."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Literal, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels import device
from mpjax.kernels.attention import gathered, plans, reference, triton
from mpjax.kernels.checks import as_array, as_arrays, require_floats, require_type, static_number
from mpjax.kernels.implementation import choose, warn, warn_of_reference
from mpjax.kernels.kv_cache import hadamard
from mpjax.kernels.kv_cache.api import int32_places, require_pages, why_not_triton
from mpjax.kernels.kv_cache.cache import PAGE_SIZES, KVPages
from mpjax.kernels.kv_cache.formats import KVFormat

PREFILL_PAGE_SIZE = 128  # of keys and values that aren't in a cache


def paged_attention(
    queries: jax.Array,
    pages: KVPages,
    block_tables: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    longest: int | None = None,
    transformed: bool = False,
    implementation: Literal["triton", "cudnn", "reference"] | None = None,
) -> jax.Array:
    """Causal attention of new tokens over a cache that already holds them.

    queries: [batch, tokens, query heads, head dim], token t of sequence b at position
        starts[b] + t. Query heads are a multiple of the pages' KV heads (GQA, MQA, MHA). Or
        packed, [tokens, query heads, head dim]: the counts[b] tokens of a sequence come after those
        of the one before, so that counts are the differences of cumulative lengths.
    pages, block_tables: one layer of the cache, after `append`. Of formats with blocks, new tokens
        past the end of one see what is before that end in codes, and so do those before it: as
        single tokens they would see their own block in 16 bits.
    starts, counts: int32 [batch], as given to `append`: starts[b] + counts[b] keys count, and
        rows past counts[b], or packed ones past the last sequence, are padding whose output means
        nothing. What stands behind them in pages of the table must be finite (KVPages).
    scale: of the scores, positive; 1/√(head dim) by default. It and the next two are numbers that
        kernels are compiled for, static under `jit`.
    window: how many keys a query sees, itself included (sliding window); None for all.
    softcap: a scaled score s becomes softcap · tanh(s / softcap) (Gemma 2); None for none.
    sinks: [query heads], a learned score of each head that joins its softmax without having a
        value, neither scaled nor capped (gpt-oss); None for none.
    longest: of packed queries, what no count exceeds, to launch no more than is needed; without it,
        all tokens may be of one sequence.
    transformed: that queries went through the Hadamard transform of the pages' keys, if theirs is a
        format with one: `rotate_and_append(..., transform_queries=True)` returns such. Others do
        so here.

    Returns the shape and dtype of the queries. On the GPU each cached byte is read once for all
    query heads of its group; long sequences are split over programs (FlashDecoding). Where many
    tokens are new, and no mask but causality is wanted, the cache is written out in 16 bits for
    cuDNN (`gathered`), up to 1 GiB of keys and values, if JAX has what that takes; the kernel
    attends else. Beside pages that keep scales it takes queries of KVPages.parameter_dtype; others
    go to the reference, with a warning. In float16, scores may reach 2**24, and so may sums of
    queries times zeros of channels.

    Raises ValueError for shapes and numbers that don't fit, of starts and counts as `append` does,
    and UnsupportedError, with the reason, where a forced implementation can't run.
    """
    require_pages("paged_attention", pages)
    queries = as_array("attention: queries", queries)
    require_floats("attention", queries=queries)
    require_type("paged_attention: transformed", transformed, bool, np.bool)
    _check(queries, (3, 4), pages.keys.shape[1], pages.head_dim)
    scale, masks = _options(queries, scale, window, softcap, sinks)
    block_tables, starts, counts = int32_places(
        "paged_attention", pages, block_tables, starts, counts, queries.shape[:-2]
    )
    longest = static_number(
        "paged_attention: longest", longest, operator.index, "a number of tokens"
    )
    if queries.size == 0:
        return jnp.zeros_like(queries)
    why_not_cudnn = gathered.why_not(queries, pages, block_tables)
    if any(mask is not None for mask in masks.values()):
        why_not_cudnn = "it knows no window, softcap or sinks"
    is_long = queries.shape[-3] >= gathered.LEAST_TOKENS
    default = "cudnn" if is_long and why_not_cudnn is None else "triton"
    is_never = why_not_cudnn is not None and why_not_cudnn == gathered.why_never()
    if implementation is None and is_long and is_never and device.on_gpu():
        warn(f"long prompts over a cache take longer: {why_not_cudnn}")
    implementation = choose(
        "paged_attention",
        implementation,
        default,
        ("triton", "cudnn", "reference"),
        lambda name: why_not_cudnn if name == "cudnn" else _why_not_triton(queries, pages),
    )
    arguments = (queries, pages, block_tables, starts, counts)
    if implementation == "reference":
        return reference.paged_attention(*arguments, scale=scale, transformed=transformed, **masks)
    if pages.format.key_codes.hadamard and not transformed:
        queries = hadamard.transform(queries)
    arguments = (queries, *arguments[1:])
    if implementation == "cudnn":
        return gathered.paged_attention(*arguments, scale=scale)
    longest = queries.shape[-3] if queries.ndim == 4 or longest is None else longest
    rows = longest * queries.shape[-2] // pages.keys.shape[1]
    is_varlen = queries.ndim == 3
    problem = plans.Problem.of(rows, pages, block_tables.shape, is_varlen=is_varlen)
    config = plans.config_of(problem)
    return triton.paged_attention(*arguments, config, scale=scale, longest=longest, **masks)


def prefill_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    implementation: Literal["cudnn", "triton", "xla", "reference"] | None = None,
) -> jax.Array:
    """Causal attention of prompts over themselves, from position 0, in 16 bits or more.

    queries: [batch, tokens, query heads, head dim]; keys, values: the same with KV heads. Prompts
    are padded on the right: causality keeps padding out of every real token.
    scale, window, softcap, sinks: as `paged_attention` takes them.

    On a GPU, 16-bit inputs with a head dimension that is a multiple of 8 up to 128 go to cuDNN's
    flash attention. It has no softcap, and gives its sums in 16 bits, too few to add a sink later:
    these, and heads of 256, go to the kernel of `paged_attention`, over keys and values copied into
    pages. The rest goes, with a warning, to XLA, and with a softcap or sinks to the reference.
    Returns the shape and dtype of the queries. Raises ValueError for shapes and numbers that don't
    fit, and UnsupportedError, with the reason, where a forced implementation can't run.
    """
    queries, keys, values = as_arrays("attention", queries=queries, keys=keys, values=values)
    require_floats("attention", queries=queries, keys=keys, values=values)
    if keys.ndim != 4 or keys.shape != values.shape or keys.shape[:2] != queries.shape[:2]:
        raise ValueError(
            f"attention: keys of shape {keys.shape} and values of shape {values.shape} must be "
            f"[batch, tokens, KV heads, head dim], of as many tokens as queries {queries.shape}"
        )
    _check(queries, (4,), keys.shape[2], keys.shape[3])
    scale, masks = _options(queries, scale, window, softcap, sinks)
    if queries.size == 0:
        return jnp.zeros_like(queries)
    window = masks["window"]
    if window is not None and window >= queries.shape[1]:
        masks["window"] = window = None  # wider than the prompt: no different, and faster

    def why_not(name: str) -> str | None:
        if name == "triton":
            return _why_not_triton(queries, jax.eval_shape(_as_pages, keys, values)[0])
        if softcap is not None or sinks is not None:
            return "it has no softcap and no sinks"
        if len({queries.dtype, keys.dtype, values.dtype}) > 1:
            dtypes = f"{queries.dtype}, {keys.dtype} and {values.dtype}"
            return f"queries, keys and values are {dtypes}, expected one dtype"
        return gathered.why_not_cudnn(queries) if name == "cudnn" else None

    implementation = choose(
        "prefill_attention",
        _choose_prefill(why_not) if implementation is None else implementation,
        "reference",
        ("cudnn", "triton", "xla", "reference"),
        why_not,
    )
    batch, tokens = queries.shape[:2]
    if implementation == "reference":
        positions = jnp.broadcast_to(jnp.arange(tokens), (batch, tokens))
        lengths = jnp.full((batch,), tokens, jnp.int32)
        return reference.attention(queries, keys, values, positions, lengths, scale=scale, **masks)
    if implementation == "triton":
        pages, block_tables = _as_pages(keys, values)
        starts, counts = (jnp.full((batch,), n, jnp.int32) for n in (0, tokens))
        return paged_attention(
            queries,
            pages,
            block_tables,
            starts,
            counts,
            scale=scale,
            implementation="triton",
            **masks,
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


class _Masks(TypedDict):
    window: int | None
    softcap: float | None
    sinks: jax.Array | None


def _choose_prefill(
    why_not: Callable[[str], str | None],
) -> Literal["cudnn", "triton", "xla", "reference"]:
    if not device.on_gpu():
        return "reference"
    if (of_cudnn := why_not("cudnn")) is None:
        return "cudnn"
    if (of_triton := why_not("triton")) is None:
        return "triton"
    warn_of_reference("prefill_attention", f"of cuDNN, {of_cudnn}; of Triton, {of_triton}")
    return "xla" if why_not("xla") is None else "reference"


def _as_pages(keys: jax.Array, values: jax.Array) -> tuple[KVPages, jax.Array]:
    """Keys and values [batch, tokens, KV heads, head dim] as KV16 pages, and block tables."""
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


def _check(queries: jax.Array, ranks: tuple[int, ...], kv_heads: int, head_dim: int) -> None:
    heads, dim = (1, *queries.shape)[-2:] if queries.ndim else (1, 1)
    if queries.ndim not in ranks or heads % kv_heads or dim != head_dim:
        packed = f", or packed [tokens, query heads, {head_dim}]," if 3 in ranks else ""
        raise ValueError(
            f"attention: queries of shape {queries.shape} must be [batch, tokens, query heads, "
            f"{head_dim}]{packed} with query heads a multiple of the {kv_heads} KV heads"
        )


def _options(
    queries: jax.Array,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: jax.Array | None,
) -> tuple[float, _Masks]:
    """The scale and the masks, or ValueError where they make no sense."""
    scale = static_number("attention: scale", scale, float, "a positive number")
    window = static_number("attention: window", window, operator.index, "a number of keys")
    softcap = static_number("attention: softcap", softcap, float, "a positive number")
    heads, dim = queries.shape[-2:]
    if sinks is not None:
        sinks = as_array("attention: sinks", sinks)
        if sinks.shape != (heads,):
            raise ValueError(
                f"attention: sinks have shape {sinks.shape}: expected ({heads},), one for each "
                "query head"
            )
    scale = 1 / math.sqrt(dim) if scale is None else scale
    return scale, {"window": window, "softcap": softcap, "sinks": sinks}
