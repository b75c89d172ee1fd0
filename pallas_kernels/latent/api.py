"""The public function of attention over latents, and the format of their pages."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from mpjax.kernels import device
from mpjax.kernels.attention import reference, token_by_token, triton
from mpjax.kernels.attention.latent_loop import LatentQueries
from mpjax.kernels.attention.plans import AttentionConfig
from mpjax.kernels.batch import Span
from mpjax.kernels.checks import as_arrays, require_floats, static_number
from mpjax.kernels.implementation import choose
from mpjax.kernels.invariance import in_row_tiles, is_batch_invariant
from mpjax.kernels.kv_cache import hadamard
from mpjax.kernels.kv_cache import reference as kv_cache
from mpjax.kernels.kv_cache.api import read_span, require_pages, why_not_written
from mpjax.kernels.kv_cache.cache import KVPages
from mpjax.kernels.kv_cache.formats import KVFormat
from mpjax.kernels.latent.plan import LatentProblem, invariant_plan, plan_by_rule
from mpjax.kernels.masks import Masks

KINDS = (16, 8, 4, "4t")  # of latents


def latent_format(format: KVFormat | str) -> KVFormat:
    """The format of pages of latents: latents as a format's keys, the rotary part as its values.

    The rotary part has 16 bits, or 8 if values have fewer: it has an eighth of a latent's channels,
    and a few of them are large.

    Raises ValueError for formats whose keys have no scales of tokens, and for blocks.
    """
    format = KVFormat.of(format)
    if format.keys not in KINDS or format.block is not None or format.scaling is not None:
        raise ValueError(
            f"{format}: a latent is kept in 16, 8 or 4 bits, with a scale for each token: expected "
            "KV16, KV8, KV4 or KV4t"
        )
    return KVFormat(format.keys, 16 if format.values == 16 else 8)


def latent_attention(
    queries: jax.Array,
    rotated: jax.Array,
    pages: KVPages,
    span: Span,
    *,
    scale: float,
    implementation: Literal["triton", "reference"] | None = None,
) -> jax.Array:
    """Causal attention of new tokens over latents, which are keys and values of all query heads.

    queries: [batch, tokens, query heads, channels of a latent], or varlen, [tokens, query heads,
        channels]: the queries after multiplication by the map from latents to keys ("absorbed").
    rotated: [..., query heads, rotary channels], the queries for the rotary part.
    pages: one layer of the cache after `append`, with one KV head: its keys are latents, and its
        values the rotary part, which here is not a value. See `latent_format`.
    span: as for `paged_attention`. scale: of the sum of both products.

    Returns the weighted means of latents, an array of the shape and dtype of the queries. Source:
    DeepSeek-V2 (arXiv 2405.04434), section 2.1.

    Raises ValueError for shapes and values that don't fit, and UnsupportedError, with the reason,
    if a forced implementation can't run.
    """
    require_pages("latent_attention", pages)
    queries, rotated = as_arrays("latent_attention", queries=queries, rotated=rotated)
    require_floats("latent_attention", queries=queries, rotated=rotated)
    dims = pages.head_dim, pages.value_dim
    if pages.keys.shape[1] != 1 or pages.residual is not None:
        raise ValueError(
            f"latent_attention: pages are of {pages.keys.shape[1]} heads in {pages.format}: "
            "expected one head, and a format without blocks"
        )
    is_fitting = queries.ndim in (3, 4) and queries.shape[:-1] == rotated.shape[:-1]
    if not is_fitting or (queries.shape[-1], rotated.shape[-1]) != dims:
        raise ValueError(
            f"latent_attention: queries have shape {queries.shape} and rotated {rotated.shape}: "
            f"expected [batch, tokens, query heads, {dims[0]}] and [..., {dims[1]}], or both "
            "without the batch"
        )
    number = static_number("latent_attention: scale", scale, float, "a positive number")
    if number is None:
        raise ValueError("latent_attention: scale is None: expected a positive number")
    span = read_span("latent_attention", span, pages, queries.shape[:-2])
    if queries.size == 0:
        return jnp.zeros_like(queries)
    names = "triton", "reference"
    implementation = choose(
        *("latent_attention", implementation, "triton", names), lambda _: _why_not(queries, pages)
    )
    masks = Masks(number)
    if implementation == "reference":
        return _reference(queries, rotated, pages, span, masks)
    config = _config(queries, pages, span)
    return by_triton(queries, rotated.astype(queries.dtype), pages, span, masks, config)


def by_triton(
    queries: jax.Array,
    rotated: jax.Array,
    pages: KVPages,
    span: Span,
    masks: Masks,
    config: AttentionConfig,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Launches the kernel. span: a result of `Span.read`."""
    is_turned = pages.format.key_codes.hadamard
    queries = in_row_tiles(hadamard.transform, queries) if is_turned else queries
    both = LatentQueries(queries, rotated)
    found = triton.paged_attention(both, pages, span, masks, config, interpret=interpret)
    assert isinstance(found, jax.Array)
    return in_row_tiles(hadamard.transform, found) if is_turned else found  # its own inverse


def _reference(
    queries: jax.Array, rotated: jax.Array, pages: KVPages, span: Span, masks: Masks
) -> jax.Array:
    def read(*places: jax.Array) -> tuple[jax.Array, jax.Array]:
        latents, rotary = kv_cache.gather(pages, *places)
        return jnp.concatenate([latents, rotary], -1), latents

    if not is_batch_invariant():
        both = jnp.concatenate([queries, rotated.astype(queries.dtype)], -1)
        return reference.over_cache(both, span, masks, read)

    def read_tile(table: jax.Array) -> tuple[jax.Array, jax.Array]:
        latents, rotary = kv_cache.gather(pages, table, transformed=True)
        return jnp.concatenate([latents, rotary], -1), latents

    is_turned = pages.format.key_codes.hadamard
    queries = in_row_tiles(hadamard.transform, queries) if is_turned else queries
    both = jnp.concatenate([queries, rotated.astype(queries.dtype)], -1)
    found = token_by_token.over_cache(both, pages, span, masks, read_tile)
    return in_row_tiles(hadamard.transform, found) if is_turned else found


def _config(queries: jax.Array, pages: KVPages, span: Span) -> AttentionConfig:
    rows = queries.shape[-3] * queries.shape[-2]
    batch, entries = span.block_tables.shape
    tokens, bits = entries * pages.page_size, pages.format.key_codes.bits
    problem = LatentProblem(batch, rows, tokens, loaded_bytes(pages), bits)
    if is_batch_invariant():
        return invariant_plan(problem, device.limits())
    return plan_by_rule(problem, device.limits())


def loaded_bytes(pages: KVPages) -> int:
    """The bytes that a program loads for a token: a latent's codes count for both products."""
    arrays = [*jax.tree.leaves(pages), *[pages.keys] * pages.format.key_codes.is_quantized]
    tokens = pages.keys.shape[0] * pages.page_size
    return sum(array.size * array.dtype.itemsize for array in arrays) // max(1, tokens)


def _why_not(queries: jax.Array, pages: KVPages) -> str | None:
    if queries.dtype not in (jnp.bfloat16, jnp.float16):
        return f"queries are {queries.dtype}, expected bfloat16 or float16"
    if pages.parameter_dtype not in (None, queries.dtype.name):
        return f"the pages are for {pages.parameter_dtype} queries and these are {queries.dtype}"
    return why_not_written(pages)
