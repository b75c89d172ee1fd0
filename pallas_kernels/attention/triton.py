"""Attention over the paged cache: one main loop for decoding and for prompts, for every KV format.

A program owns a tile of rows, the (token, query head) pairs that share a KV head, and one of
`splits` ranges of that sequence's pages; decoding is the case of one token. Keys and values are
decoded to integers centred on zero, exact in 16 bits, and what is linear is folded away from the
elements: with k = code·s + m, a score is s·(q · code) + m·Σq, and likewise for values, so a cached
element costs its decoding and its multiply-add in the tensor core (TurboMind section 3.4).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import arithmetic as arithmetics
from pallas_kernels import backend
from pallas_kernels.bits import decode_centred, unpack_pair
from pallas_kernels.kv_cache.cache import KVFormat, KVPages

_FLOOR = -1e30  # below any score, and finite, so that a tile without visible keys makes no NaN
_HIDDEN = 2 * _FLOOR  # of keys that a row doesn't see: of weight zero, also beside no other

_TINY = 1e-37  # smaller steps have no reciprocal


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Rows in a tile, programs that share one sequence's pages, and compiler settings."""

    tile_rows: int
    splits: int
    warps: int
    stages: int


def paged_attention(
    queries: jax.Array,
    pages: KVPages,
    block_tables: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    config: AttentionConfig,
    *,
    scale: float,
    window: int | None,
    interpret: bool = False,
) -> jax.Array:
    """See api.paged_attention."""
    batch, tokens, heads, dim = queries.shape
    kv_heads = pages.keys.shape[1]
    group = heads // kv_heads
    rows = tokens * group
    # [batch, KV heads, rows, dim]: a row is a (token, head of the group) pair
    arranged = queries.reshape(batch, tokens, kv_heads, group, dim).swapaxes(1, 2)
    arranged = arranged.reshape(batch, kv_heads, rows, dim)
    parameters = [p for p in (pages.key_parameters, pages.value_parameters) if p is not None]
    kernel = functools.partial(
        _kernel,
        format=pages.format,
        config=config,
        group=group,
        scale=scale,
        window=window,
        ptx=not interpret,
    )
    splits = config.splits
    outputs, sums = backend.pallas_call(
        kernel,
        arranged,
        block_tables,
        starts,
        counts,
        pages.keys,
        pages.values,
        *parameters,
        out_shape=(
            jax.ShapeDtypeStruct(
                (batch, kv_heads, splits, rows, dim), queries.dtype if splits == 1 else jnp.float32
            ),
            jax.ShapeDtypeStruct((batch, kv_heads, splits, rows), jnp.float32),
        ),
        grid=(pl.cdiv(rows, config.tile_rows), batch * kv_heads, splits),
        name=f"attention_kv{pages.format.bits}",
        warps=config.warps,
        stages=config.stages,
        interpret=interpret,
    )
    if splits == 1:
        out = outputs[:, :, 0]
    else:
        out = _combine(outputs, sums, queries.dtype, interpret=interpret)
    out = out.reshape(batch, kv_heads, tokens, group, dim).swapaxes(1, 2)
    return out.reshape(batch, tokens, heads, dim)


def _combine(
    outputs: jax.Array, sums: jax.Array, dtype: jnp.dtype, *, interpret: bool
) -> jax.Array:
    """Joins splits: outputs [batch, heads, splits, rows, dim], sums log2 of their weights."""
    batch, heads, _, rows, dim = outputs.shape
    return backend.pallas_call(
        _combine_kernel,
        outputs,
        sums,
        out_shape=jax.ShapeDtypeStruct((batch, heads, rows, dim), dtype),
        grid=(rows, heads, batch),
        name="attention_combine",
        warps=4,
        stages=1,
        interpret=interpret,
    )


def _combine_kernel(outputs_ref: Any, sums_ref: Any, out_ref: Any) -> None:
    row, head, batch = (pl.program_id(axis) for axis in range(3))
    splits, dim = outputs_ref.shape[2], outputs_ref.shape[4]
    split, lane = jnp.arange(pl.next_power_of_2(splits)), jnp.arange(dim)
    mask = split < splits
    sums = backend.load(sums_ref.at[batch, head, split, row], mask=mask, other=_FLOOR)
    weights = jnp.where(mask, jnp.exp2(sums - sums.max()), 0.0)
    parts = backend.load_masked(
        outputs_ref.at[batch, head, split[:, None], row, lane[None, :]], mask
    )  # [splits, dim]
    joined = (parts * weights[:, None]).sum(0) / weights.sum()
    backend.store(out_ref.at[batch, head, row, lane], joined.astype(out_ref.dtype))


def _kernel(
    queries_ref: Any,  # [batch, KV heads, rows, dim]
    block_tables_ref: Any,  # [batch, pages per sequence]
    starts_ref: Any,  # [batch]
    counts_ref: Any,  # [batch]
    keys_ref: Any,  # [pages, KV heads, page size, words]
    values_ref: Any,
    *refs: Any,  # key and value parameters [pages, KV heads, page size], unless KV16; outputs
    format: KVFormat,
    config: AttentionConfig,
    group: int,
    scale: float,
    window: int | None,
    ptx: bool,
) -> None:
    *parameter_refs, out_ref, sums_ref = refs
    kv_heads, page_size, width = keys_ref.shape[1:]
    rows, dtype = queries_ref.shape[2], queries_ref.dtype
    batch, head = pl.program_id(1) // kv_heads, pl.program_id(1) % kv_heads
    split = pl.program_id(2)
    first_row = pl.program_id(0) * config.tile_rows
    row = first_row + jnp.arange(config.tile_rows)
    lane, slot = jnp.arange(width), jnp.arange(page_size)
    row_mask = row < rows
    start = backend.load(starts_ref.at[batch])
    count = backend.load(counts_ref.at[batch])
    length = jnp.minimum(start + count, block_tables_ref.shape[1] * page_size)
    position = start + row // group  # [rows]
    limit = jnp.minimum(position, length - 1)  # the last visible key

    queries = [
        backend.load_masked(
            queries_ref.at[batch, head, row[:, None], (plane * width + lane)[None, :]], row_mask
        )
        for plane in range(format.planes)
    ]
    query_sum = functools.reduce(jnp.add, [q.astype(jnp.float32).sum(1) for q in queries])  # [rows]

    arithmetic = arithmetics.PTX if ptx else arithmetics.PLAIN
    log2_scale = scale * math.log2(math.e)

    # A power of two on all weights cancels in the end. It keeps small ones, times the small steps
    # of values, out of float16's subnormals; a step is no more than 131008 / (2**bits - 1).
    lift = {16: 15.0, 8: 6.0, 4: 2.0}[format.bits] if dtype == jnp.float16 else 0.0

    # Which operand of the tensor cores is the narrow one, eight high: a few rows, or, where there
    # are many, keys. Scores are [page size, rows] or [rows, page size].
    few = config.tile_rows <= 8
    slots, across = (0, 1) if few else (1, 0)

    def for_slots(x: jax.Array) -> jax.Array:
        return jnp.expand_dims(x, across)

    def for_rows(x: jax.Array) -> jax.Array:
        return jnp.expand_dims(x, slots)

    def tile_shape(slot_side: int, row_side: int = config.tile_rows) -> tuple[int, int]:
        return (slot_side, row_side) if few else (row_side, slot_side)

    def times_queries(keys: jax.Array, q: jax.Array) -> jax.Array:
        return backend.dot(*((keys, q) if few else (q, keys)), trans_b=True)

    def times_values(weights: jax.Array, values: jax.Array) -> jax.Array:
        return backend.dot(*((values, weights) if few else (weights, values)))

    def fetch_keys(page: jax.Array) -> jax.Array:
        return backend.load(keys_ref.at[page, head, slot[:, None], lane[None, :]])

    def fetch_values(page: jax.Array) -> jax.Array:
        at = (slot[None, :], lane[:, None]) if few else (slot[:, None], lane[None, :])
        return backend.load(values_ref.at[page, head, *at])

    def decode(words: jax.Array, plane: int) -> jax.Array:
        if not format.is_quantized:
            return words.astype(dtype)
        return decode_centred(words, plane, format.bits, dtype, ptx=ptx)

    def fetch_parameters(ref: Any, page: jax.Array) -> tuple[jax.Array, jax.Array]:
        half = jnp.dtype(dtype)
        step, zero = unpack_pair(backend.load(ref.at[page, head, slot]), half, half)
        step = step.astype(jnp.float32)
        middle = zero.astype(jnp.float32) + step * float(2 ** (format.bits - 1))
        return step, middle  # [page size] each

    # Sums over keys. A narrow tile keeps one for each slot of a page, so that the warps, between
    # which the slots are divided, meet once in the end instead of at every page.
    by_slot = config.tile_rows <= 16

    def gather(x: jax.Array) -> jax.Array:
        return x if by_slot else x.sum(slots, keepdims=True)

    def visit(entry: jax.Array, carry: Any) -> Any:
        accumulators, middle_sum, peak, total = carry
        page = backend.load(block_tables_ref.at[batch, entry])
        words = fetch_keys(page)
        scores = jnp.zeros(tile_shape(page_size), jnp.float32)
        for plane, q in enumerate(queries):
            scores += times_queries(decode(words, plane), q)
        if format.is_quantized:
            # Scaled for each slot, of which there are fewer than scores.
            step, middle = (x * log2_scale for x in fetch_parameters(parameter_refs[0], page))
            offset = for_slots(middle) * for_rows(query_sum)
            scores = arithmetic.multiply_add(scores, for_slots(step), offset)
        else:
            scores *= log2_scale
        key = entry * page_size + slot
        visible = for_slots(key) <= for_rows(limit)
        if window is not None:
            visible &= for_slots(key) > for_rows(position - window)
        scores = jnp.where(visible, scores, _HIDDEN)
        new_peak = jnp.maximum(peak, scores.max(slots))
        shrink = for_rows(arithmetic.exp2(peak - new_peak))
        weights = arithmetic.exp2(scores - for_rows(new_peak - lift))
        # What multiplies the codes is rounded to 16 bits. The total and the sum of middles must use
        # the same rounded weights: codes and middles may be large and all but cancel.
        if format.is_quantized:
            step, middle = fetch_parameters(parameter_refs[1], page)
            weights = arithmetic.narrow(weights * for_slots(step), dtype)
            # Slots that were never written have a step of 0.
            inverse = jnp.where(step < _TINY, 0.0, arithmetic.reciprocal(step))
            rounded = weights.astype(jnp.float32) * for_slots(inverse)
            middle_sum = arithmetic.multiply_add(
                middle_sum, shrink, gather(rounded * for_slots(middle))
            )
        else:
            weights = arithmetic.narrow(weights, dtype)
            rounded = weights.astype(jnp.float32)
        total = arithmetic.multiply_add(total, shrink, gather(rounded))
        words = fetch_values(page)
        accumulators = tuple(
            accumulator * shrink + times_values(weights, decode(words, plane))
            for plane, accumulator in enumerate(accumulators)
        )
        return accumulators, middle_sum, new_peak, total

    last_token = jnp.minimum(first_row + config.tile_rows, rows) - 1
    end = jnp.minimum(length, start + last_token // group + 1)
    end = jnp.where(count > 0, end, 0)  # a sequence without new tokens has nothing to read
    begin = jnp.int32(0)
    if window is not None:
        begin = jnp.maximum(0, start + first_row // group - window + 1)
    first_page, end_page = begin // page_size, (end + page_size - 1) // page_size
    share = (end_page - first_page + config.splits - 1) // config.splits
    first = first_page + split * share
    last = jnp.minimum(first + share, end_page)
    zeros = jnp.zeros(tile_shape(page_size if by_slot else 1), jnp.float32)
    carry = (
        tuple(jnp.zeros(tile_shape(width), jnp.float32) for _ in queries),
        zeros,
        jnp.full((config.tile_rows,), _FLOOR),
        zeros,
    )
    accumulators, middle_sum, peak, total = jax.lax.fori_loop(first, last, visit, carry)
    middle_sum, total = middle_sum.sum(slots), total.sum(slots)

    # An empty range has weight zero, and its output must be a number all the same.
    divisor = jnp.where(total == 0, 1.0, total)
    for plane, accumulator in enumerate(accumulators):
        out = (accumulator + for_rows(middle_sum)) / for_rows(divisor)
        target = out_ref.at[batch, head, split, row[:, None], (plane * width + lane)[None, :]]
        mask = jnp.broadcast_to(row_mask[:, None], (config.tile_rows, width))
        backend.store(target, (out.T if few else out).astype(out_ref.dtype), mask=mask)
    sums = jnp.where(total == 0, _FLOOR, peak + jnp.log2(divisor))
    backend.store(sums_ref.at[batch, head, split, row], sums, mask=row_mask)
