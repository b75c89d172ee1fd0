"""The public function that appends keys and values to the cache, and checks of its arguments."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax

from mpjax.kernels import device
from mpjax.kernels import implementation as implementations
from mpjax.kernels.batch import Span
from mpjax.kernels.checks import as_arrays, require_floats, require_type
from mpjax.kernels.kv_cache import reference, residual, triton
from mpjax.kernels.kv_cache.cache import KVPages
from mpjax.kernels.kv_cache.codes import Float8
from mpjax.kernels.kv_cache.varlen import as_single_tokens

# The head dimensions that the Triton kernels take.
HEAD_DIMS = (64, 80, 96, 112, 128, 160, 192, 256, 512)


def append(
    pages: KVPages,
    keys: jax.Array,
    values: jax.Array,
    span: Span,
    *,
    implementation: Literal["triton", "reference"] | None = None,
) -> KVPages:
    """Encodes keys and values and writes them into one layer's pages, in place under donation.

    pages: one layer of the cache.
    keys, values: [batch, tokens, KV heads, head dim], keys after the rotary embedding; or
        varlen, [tokens, KV heads, head dim]. If the pages' layout has a `value_dim`, it is the head
        dim of values. They must not be NaN: minima and maxima ignore NaN, so it may be stored as a
        number.
    span: the positions of these tokens. Padding is not written, and neither are tokens past the end
        of a sequence's block table: make room first (PagedKVCache.require_room, outside `jit`).

    Returns the pages. Their scales and zeros are rounded to the pages' own dtype
    (KVPages.parameter_dtype), whatever the dtype of the keys.

    Raises UnsupportedError if a forced implementation can't run. Raises ValueError for shapes that
    don't fit the pages, keys or values that are not floating point, and a span of other tokens.
    Outside `jit`, it also raises ValueError for negative starts, and for counts above the number of
    tokens: for that it copies starts and counts back from the device, once.
    """
    require_pages("append", pages)
    keys, values = as_arrays("append", keys=keys, values=values)
    heads, dims = pages.keys.shape[1], (pages.head_dim, pages.value_dim)
    sides = zip((keys, values), dims, strict=True)
    fit = all(x.ndim in (3, 4) and x.shape[-2:] == (heads, dim) for x, dim in sides)
    if not fit or keys.shape[:-1] != values.shape[:-1]:
        raise ValueError(
            f"append: keys {keys.shape} and values {values.shape} must be [batch, tokens, {heads}, "
            f"{' or '.join(str(dim) for dim in dict.fromkeys(dims))}], the KV heads and head "
            "dimension of the pages, or without the batch where tokens are varlen"
        )
    require_floats("append", keys=keys, values=values)
    span = read_span("append", span, pages, keys.shape[:-2])
    if keys.size == 0:
        return pages
    module = _module(pages, implementation)
    target = pages
    if pages.residual is not None:
        pages = module.flush(pages, keys, values, span)
        assert pages.residual is not None
        target, span = pages.residual, residual.residual_span(pages, span)
    if keys.ndim == 3:
        span = as_single_tokens(span, len(keys), target.page_size)
        keys, values = keys[:, None], values[:, None]
    target = module.append(target, keys, values, span)
    return target if pages.residual is None else dataclasses.replace(pages, residual=target)


def make_room(
    pages: KVPages,
    span: Span,
    *,
    implementation: Literal["triton", "reference"] | None = None,
) -> KVPages:
    """Encodes the residuals of sequences whose next token begins a new block.

    `append` does this before it writes. Callers that write to the residual themselves, at most one
    token of each sequence (span.longest is 1), call this first, and then write with the span of
    `residual.residual_span`.

    Returns the pages, with the residual unchanged.
    """
    return _module(pages, implementation).flush(pages, None, None, span)


def _module(pages: KVPages, wanted: str | None) -> Any:
    reason, choices = why_not_written(pages), ("triton", "reference")
    name = implementations.choose("append", wanted, "triton", choices, lambda _: reason)
    return triton if name == "triton" else reference


def require_pages(operation: str, pages: Any) -> None:
    """Raises ValueError unless `pages` is a KVPages (and not a whole cache, for example)."""
    require_type(f"{operation}: pages", pages, KVPages, hint=", one of a PagedKVCache's layers")


def read_span(operation: str, span: Span, pages: KVPages, new: tuple[int, ...]) -> Span:
    """As `Span.read`, but also raises ValueError if the pages' residual is of another batch.

    new: the shape [batch, tokens] of the new tokens, or [tokens] if varlen.
    """
    require_type(f"{operation}: span", span, Span)
    span = span.read(operation, new)
    if pages.residual is None or span.residual_pages is not None:
        return span
    if (batch := pages.residual.keys.shape[0]) != len(span.starts):
        raise ValueError(
            f"{operation}: the pages' residual is of a batch of {batch}: expected "
            f"{len(span.starts)}, that of block_tables, starts and counts"
        )
    return span


def why_not_triton(pages: KVPages) -> str | None:
    """The reason why attention's Triton kernels can't use these pages here, or None if they can."""
    if reason := why_not_written(pages):
        return reason
    if pages.head_dim not in HEAD_DIMS:
        return f"head dimension {pages.head_dim} is not one of {HEAD_DIMS}"
    if pages.head_dim != pages.value_dim:
        return f"keys have {pages.head_dim} channels and values {pages.value_dim}"
    return None


def why_not_written(pages: KVPages) -> str | None:
    """The reason why a Triton kernel can't write to these pages here, or None if it can."""
    if reason := device.why_triton_cannot_run():
        return reason
    for side in pages.sides + (() if pages.residual is None else pages.residual.sides):
        if side.words.dtype.itemsize != 2:
            return f"pages of {side.words.dtype} are not 16 bits wide"
        if isinstance(side.codes, Float8) and (reason := device.why_not_float8()):
            return reason
    for dim in (pages.head_dim, pages.value_dim):
        if dim not in HEAD_DIMS:
            return f"head dimension {dim} is not one of {HEAD_DIMS}"
    return None
