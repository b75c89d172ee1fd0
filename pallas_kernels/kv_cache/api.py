"""Adding tokens to the cache."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels import device
from mpjax.kernels import implementation as implementations
from mpjax.kernels.checks import are_between, as_arrays, is_known, require_floats, require_type
from mpjax.kernels.kv_cache import reference, residual, triton
from mpjax.kernels.kv_cache.cache import KVPages
from mpjax.kernels.kv_cache.codes import Float8
from mpjax.kernels.kv_cache.packed import as_single_tokens

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

    Scales and zeros are rounded to the pages' own dtype (PagedKVCache.create), whatever that of the
    keys. These must be numbers: a NaN may be stored as one, since minima and maxima pass over it.
    Tokens past the end of a sequence's block table are not written either: make room first
    (PagedKVCache.require_room, outside `jit`). Raises UnsupportedError where the implementation
    can't run, and ValueError for shapes that don't fit the pages, keys that are no floating-point
    numbers and, where values are known (which under `jit` they are not), negative starts and counts
    that the tokens don't have: an array is read back from the device for that, once.
    """
    require_pages("append", pages)
    keys, values = as_arrays("append", keys=keys, values=values)
    expected = (pages.keys.shape[1], pages.head_dim)
    if keys.shape != values.shape or keys.shape[-2:] != expected or keys.ndim not in (3, 4):
        raise ValueError(
            f"append: keys {keys.shape} and values {values.shape} must be [batch, tokens, "
            f"{expected[0]}, {expected[1]}], the KV heads and head dimension of the pages, or "
            "without the batch where sequences are packed"
        )
    require_floats("append", keys=keys, values=values)
    places = int32_places("append", pages, block_tables, starts, counts, keys.shape[:-2])
    if keys.size == 0:
        return pages
    module = _module(pages, implementation)
    target = pages
    if pages.residual is not None:
        pages = _flush(module, pages, keys, values, *places)
        assert pages.residual is not None
        target, places = pages.residual, residual.places(pages, *places)
    if keys.ndim == 3:
        places = as_single_tokens(*places, len(keys), target.page_size)
        keys, values = keys[:, None], values[:, None]
    target = module.append(target, keys, values, *places)
    return target if pages.residual is None else dataclasses.replace(pages, residual=target)


def make_room(
    pages: KVPages,
    block_tables: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    *,
    implementation: Literal["triton", "reference"] | None = None,
) -> KVPages:
    """Encodes the tokens that wait in 16 bits, of sequences that get one token in another block.

    What `append` does before it writes, for callers that write to the residual themselves, one
    token of a sequence at most: at `residual.places`.
    """
    return _flush(_module(pages, implementation), pages, None, None, block_tables, starts, counts)


def _flush(
    module: Any,
    pages: KVPages,
    keys: jax.Array | None,
    values: jax.Array | None,
    block_tables: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
) -> KVPages:
    """Encodes every block that is complete when new tokens begin one behind it."""
    tokens = 1
    first_tokens = jnp.zeros_like(starts)
    if keys is not None and values is not None:
        tokens = keys.shape[-3]
        offsets = jnp.arange(len(starts), dtype=starts.dtype) * tokens
        first_tokens = jnp.cumsum(counts) - counts if keys.ndim == 3 else offsets
        keys, values = (x.reshape(-1, *x.shape[-2:]) for x in (keys, values))
    return module.flush(pages, keys, values, first_tokens, tokens, block_tables, starts, counts)


def _module(pages: KVPages, wanted: str | None) -> Any:
    reason, choices = why_not_triton(pages), ("triton", "reference")
    name = implementations.choose("append", wanted, "triton", choices, lambda _: reason)
    return triton if name == "triton" else reference


def require_pages(operation: str, pages: Any) -> None:
    """Raises ValueError for anything but the pages of a layer, such as a whole cache."""
    require_type(f"{operation}: pages", pages, KVPages, hint=", one of a PagedKVCache's layers")


def int32_places(
    operation: str,
    pages: KVPages,
    block_tables: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    new: tuple[int, ...],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Block tables, starts and counts as int32, in which positions are computed.

    new: [batch, tokens] of the new ones, or [tokens] where sequences are packed.

    Raises ValueError unless they are integers that fit the tokens.
    """
    block_tables, starts, counts = as_arrays(
        operation, block_tables=block_tables, starts=starts, counts=counts
    )
    sequences, *_ = (*block_tables.shape, 0)
    for name, array, shape in (
        ("block_tables", block_tables, "[batch, pages per sequence]"),
        ("starts", starts, "[batch]"),
        ("counts", counts, "[batch]"),
    ):
        is_fitting = array.ndim == len(shape.split(",")) and array.shape[0] == sequences
        if not (is_fitting and jnp.issubdtype(array.dtype, jnp.integer)):
            raise ValueError(
                f"{operation}: {name} is {array.dtype} of shape {array.shape}: expected int32 "
                f"{shape}, and the batch of block_tables is {sequences}"
            )
    waiting = None if pages.residual is None else pages.residual.keys.shape[0]
    batch = new[0] if len(new) == 2 else None
    for name, found in (("tokens are", batch), ("the pages' residual is", waiting)):
        if found not in (None, sequences):
            raise ValueError(
                f"{operation}: {name} of a batch of {found}: expected {sequences}, that of "
                "block_tables, starts and counts"
            )
    limits = f"0 to {new[-1]}, the new tokens"
    if batch is None:
        limits += ", and no more in all"
    for name, array, largest, limit in (
        ("starts", starts, 2**31 - 1, "0 or above"),
        ("counts", counts, new[-1], limits),
    ):
        is_fitting = are_between(array, 0, largest)
        if name == "counts" and batch is None and is_known(array):
            is_fitting = is_fitting and int(np.asarray(array).sum()) <= largest
        if not is_fitting:
            raise ValueError(
                f"{operation}: {name} are {np.asarray(array).tolist()}: expected {limit}"
            )
    block_tables, starts, counts = (
        jnp.asarray(array, jnp.int32) for array in (block_tables, starts, counts)
    )
    return block_tables, starts, counts


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
