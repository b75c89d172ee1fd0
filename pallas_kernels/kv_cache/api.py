"""Adding tokens to the cache."""

from __future__ import annotations

from typing import Literal

import jax

from pallas_kernels import backend
from pallas_kernels.kv_cache import reference, triton
from pallas_kernels.kv_cache.cache import KVPages
from pallas_kernels.kv_cache.codes import Float8
from pallas_kernels.kv_cache.packed import as_single_tokens

HEAD_DIMS = (64, 96, 128, 256)  # of the Triton kernels


def append(
    pages: KVPages,
    keys: jax.Array,
    values: jax.Array,
    block_tables: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    *,
    implementation: Literal["triton", "reference"] | None = None,
) -> KVPages:
    """Encodes keys and values and writes them into one layer's pages, in place under donation.

    keys, values: [batch, tokens, KV heads, head dim], keys after the rotary embedding; or packed,
        [tokens, KV heads, head dim], the tokens of a sequence after those of the one before.
    block_tables: int32 [batch, pages per sequence].
    starts: int32 [batch], the position of each sequence's first new token.
    counts: int32 [batch], how many of the `tokens` are real, or belong to the sequence; the rest,
        padding, is not written.

    Tokens past the end of a sequence's block table are not written either: make room first
    (PagedKVCache.require_room, outside `jit`). Raises UnsupportedError where the implementation
    can't run, and ValueError for shapes that don't fit the pages.
    """
    expected = (pages.keys.shape[1], pages.head_dim)
    if keys.shape != values.shape or keys.shape[-2:] != expected or keys.ndim not in (3, 4):
        raise ValueError(
            f"append: keys {keys.shape} and values {values.shape} must be [batch, tokens, "
            f"{expected[0]}, {expected[1]}], the KV heads and head dimension of the pages, or "
            "without the batch where sequences are packed"
        )
    if keys.size == 0:
        return pages
    places = block_tables, starts, counts
    if keys.ndim == 3:
        places = as_single_tokens(*places, len(keys), pages.page_size)
        keys, values = keys[:, None], values[:, None]
    arguments = (pages, keys, values, *places)
    if implementation is None:
        implementation = "triton"
        if reason := why_not_triton(pages):
            backend.warn_of_reference("append", reason)
            implementation = "reference"
    if implementation == "reference":
        return reference.append(*arguments)
    if implementation != "triton":
        raise ValueError(
            f"append: unknown implementation {implementation!r}: expected triton or reference"
        )
    if reason := why_not_triton(pages):
        raise backend.UnsupportedError(f"append: implementation='triton' can't run: {reason}")
    return triton.append(*arguments)


def why_not_triton(pages: KVPages) -> str | None:
    """Why Triton kernels can't work on these pages here, or None if they can."""
    if reason := backend.why_triton_cannot_run():
        return reason
    for side in pages.sides:
        if side.words.dtype.itemsize != 2:
            return f"pages of {side.words.dtype} are not 16 bits wide"
        if isinstance(side.codes, Float8) and (reason := backend.why_not_float8()):
            return reason
    if pages.head_dim not in HEAD_DIMS:
        return f"head dimension {pages.head_dim} is not one of {HEAD_DIMS}"
    return None
