"""Adding tokens to the cache."""

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

HEAD_DIMS = (64, 96, 128, 256)  # of the Triton kernels


def append(
    pages: KVPages,
    keys: jax.Array,
    values: jax.Array,
    span: Span,
    *,
    implementation: Literal["triton", "reference"] | None = None,
) -> KVPages:
    """Encodes keys and values and writes them into one layer's pages, in place under donation.

    keys, values: [batch, tokens, KV heads, head dim], keys after the rotary embedding; or
        varlen, [tokens, KV heads, head dim].
    span: where these tokens lie. Padding is not written.

    Scales and zeros are rounded to the pages' own dtype (PagedKVCache.create), whatever that of the
    keys. These must be numbers: a NaN may be stored as one, since minima and maxima pass over it.
    Tokens past the end of a sequence's block table are not written either: make room first
    (PagedKVCache.require_room, outside `jit`). Raises UnsupportedError where the implementation
    can't run, and ValueError for shapes that don't fit the pages, keys that are no floating-point
    numbers, for a span of other tokens and, where values are known (which under `jit` they are
    not), negative starts and counts that the tokens don't have: an array is read back from the
    device for that, once.
    """
    require_pages("append", pages)
    keys, values = as_arrays("append", keys=keys, values=values)
    expected = (pages.keys.shape[1], pages.head_dim)
    if keys.shape != values.shape or keys.shape[-2:] != expected or keys.ndim not in (3, 4):
        raise ValueError(
            f"append: keys {keys.shape} and values {values.shape} must be [batch, tokens, "
            f"{expected[0]}, {expected[1]}], the KV heads and head dimension of the pages, or "
            "without the batch where tokens are varlen"
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
        target, span = pages.residual, residual.waiting_span(pages, span)
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
    """Encodes the tokens that wait in 16 bits, of sequences that get one token in another block.

    `append` does this before it writes. Callers that write to the residual themselves, one token
    of a sequence at most (span.longest is 1), do so with `residual.waiting_span`.
    """
    return _module(pages, implementation).flush(pages, None, None, span)


def _module(pages: KVPages, wanted: str | None) -> Any:
    reason, choices = why_not_triton(pages), ("triton", "reference")
    name = implementations.choose("append", wanted, "triton", choices, lambda _: reason)
    return triton if name == "triton" else reference


def require_pages(operation: str, pages: Any) -> None:
    """Raises ValueError for anything but the pages of a layer, such as a whole cache."""
    require_type(f"{operation}: pages", pages, KVPages, hint=", one of a PagedKVCache's layers")


def read_span(operation: str, span: Span, pages: KVPages, new: tuple[int, ...]) -> Span:
    """`Span.read`, which raises ValueError also for a residual of another batch."""
    require_type(f"{operation}: span", span, Span)
    span = span.read(operation, new)
    waiting = None if pages.residual is None else pages.residual.keys.shape[0]
    if waiting not in (None, len(span.starts)):
        raise ValueError(
            f"{operation}: the pages' residual is of a batch of {waiting}: expected "
            f"{len(span.starts)}, that of block_tables, starts and counts"
        )
    return span


def why_not_triton(pages: KVPages) -> str | None:
    """Why Triton kernels can't work on these pages here, or None if they can."""
    if reason := device.why_triton_cannot_run():
        return reason
    for side in pages.sides + (() if pages.residual is None else pages.residual.sides):
        if side.words.dtype.itemsize != 2:
            return f"pages of {side.words.dtype} are not 16 bits wide"
        if isinstance(side.codes, Float8) and (reason := device.why_not_float8()):
            return reason
    if pages.head_dim not in HEAD_DIMS:
        return f"head dimension {pages.head_dim} is not one of {HEAD_DIMS}"
    return None
