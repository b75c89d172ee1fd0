"""Attention over the paged cache: one main loop for decoding and for prompts, for every KV format.

A program owns a tile of rows, the (token, query head) pairs that share a KV head, and one of
`splits` ranges of that sequence's pages; decoding is the case of one token. Keys and values are
decoded to what is exact in 16 bits, integers to such as are centred on zero, and what is linear is
folded away from the elements: with k = code·s + m, a score is s·(q · code) + m·Σq, and likewise for
values, so a cached element costs its decoding and its multiply-add in the tensor core (TurboMind
section 3.4). The scales and middles of channels are folded into the query, once for every tile.
Tiles of tokens that wait in 16 bits come last, in the same loop body (BitDecoding section IV-A).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import arithmetic as arithmetics
from pallas_kernels import backend
from pallas_kernels.attention.tiles import (
    Place,
    Span,
    fetch_channels,
    fetch_parameters,
    locate,
    spans,
)
from pallas_kernels.attention.tiles import operands as fetch_operands
from pallas_kernels.kv_cache import residual as residuals
from pallas_kernels.kv_cache.cache import KVPages

_FLOOR = -1e30  # below any score, and finite, so that a tile without visible keys makes no NaN
_HIDDEN = 2 * _FLOOR  # of keys that a row doesn't see: of weight zero, also beside no other

_TINY = 1e-37  # smaller steps have no reciprocal


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Rows and keys in a tile, programs that share one sequence, and compiler settings.

    A tile of keys is a piece of a page, or several pages: both sizes are powers of two.
    """

    tile_rows: int
    tile_keys: int
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
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    longest: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See api.paged_attention."""
    *leading, heads, dim = queries.shape
    batch, kv_heads = len(starts), pages.keys.shape[1]
    group = heads // kv_heads
    is_packed = len(leading) == 1
    offsets = jnp.cumsum(counts) - counts if is_packed else None
    longest = leading[-1] if longest is None or not is_packed else longest
    flat = queries.reshape(-1, heads, dim)
    kernel = functools.partial(
        _kernel,
        config=config,
        longest=longest,
        scale=scale,
        window=window,
        softcap=softcap,
        ptx=not interpret,
    )
    splits = config.splits
    outputs, sums = backend.pallas_call(
        kernel,
        _Operands(flat, block_tables, starts, counts, offsets, sinks),
        pages,
        out_shape=(
            jax.ShapeDtypeStruct(
                (len(flat), heads, splits, dim), queries.dtype if splits == 1 else jnp.float32
            ),
            jax.ShapeDtypeStruct((len(flat), heads, splits), jnp.float32),
        ),
        grid=(pl.cdiv(longest * group, config.tile_rows), batch * kv_heads, splits),
        name=f"attention_{pages.format}".lower(),
        warps=config.warps,
        stages=config.stages,
        interpret=interpret,
    )
    if splits > 1:
        outputs = _combine(outputs, sums, queries.dtype, interpret=interpret)
    return outputs.reshape(queries.shape)


def _combine(
    outputs: jax.Array, sums: jax.Array, dtype: jnp.dtype, *, interpret: bool
) -> jax.Array:
    """Joins splits: outputs [tokens, heads, splits, dim], sums log2 of their weights."""
    tokens, heads, _, dim = outputs.shape
    return backend.pallas_call(
        _combine_kernel,
        outputs,
        sums,
        out_shape=jax.ShapeDtypeStruct((tokens, heads, dim), dtype),
        grid=(tokens, heads),
        name="attention_combine",
        warps=4,
        stages=1,
        interpret=interpret,
    )


def _combine_kernel(outputs_ref: Any, sums_ref: Any, out_ref: Any) -> None:
    token, head = pl.program_id(0), pl.program_id(1)
    splits, dim = outputs_ref.shape[2:]
    split, lane = jnp.arange(pl.next_power_of_2(splits)), jnp.arange(pl.next_power_of_2(dim))
    mask = split < splits
    sums = backend.load(sums_ref.at[token, head, split], mask=mask, other=_FLOOR)
    weights = jnp.where(mask, jnp.exp2(sums - sums.max()), 0.0)
    parts = backend.load_masked(
        outputs_ref.at[token, head, split[:, None], lane[None, :]],
        mask[:, None] & (lane < dim)[None, :],
    )  # [splits, dim]
    joined = (parts * weights[:, None]).sum(0) / weights.sum()
    backend.store(out_ref.at[token, head, lane], joined.astype(out_ref.dtype), mask=lane < dim)


class _Operands(NamedTuple):
    """What the kernel reads besides the pages; references, inside of it."""

    queries: Any  # [tokens, query heads, dim]
    block_tables: Any  # [batch, pages per sequence]
    starts: Any  # [batch]
    counts: Any  # [batch]
    offsets: Any  # [batch], of each sequence's first token among packed ones, or None
    sinks: Any  # [query heads] or None


def _kernel(
    operands: _Operands,
    pages: KVPages,
    out_ref: Any,  # [tokens, query heads, splits, dim]
    sums_ref: Any,  # [tokens, query heads, splits]
    *,
    config: AttentionConfig,
    longest: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    ptx: bool,
) -> None:
    keys, values = pages.sides
    kv_heads, page_size, key_width = keys.words.shape[1:]
    value_width = values.words.shape[3]
    group, dtype = operands.queries.shape[1] // kv_heads, operands.queries.dtype
    batch, head = pl.program_id(1) // kv_heads, pl.program_id(1) % kv_heads
    split = pl.program_id(2)
    first_row = pl.program_id(0) * config.tile_rows
    row = first_row + jnp.arange(config.tile_rows)
    key_spans, value_spans = spans(key_width), spans(value_width)
    start = backend.load(operands.starts.at[batch])
    count = backend.load(operands.counts.at[batch])
    real_rows = count * group
    if operands.offsets is None:
        first_token, row_mask = batch * longest, row < longest * group
    else:
        first_token, row_mask = backend.load(operands.offsets.at[batch]), row < real_rows
    # A row is a token and one of the query heads that share the KV head.
    place_of_row = first_token + row // group, head * group + row % group
    entries = operands.block_tables.shape[1]
    length = jnp.minimum(start + count, entries * page_size)
    position = start + row // group  # [rows]
    limit = jnp.minimum(position, length - 1)  # the last visible key

    def load_queries(plane: int, span: Span) -> jax.Array:
        channel = plane * key_width + span.lanes
        mask = row_mask[:, None] if span.mask is None else row_mask[:, None] & span.mask[None, :]
        token, query_head = (index[:, None] for index in place_of_row)
        return backend.load_masked(operands.queries.at[token, query_head, channel[None, :]], mask)

    queries = [
        [load_queries(plane, span) for plane in range(keys.codes.planes)] for span in key_spans
    ]
    sums = [q.astype(jnp.float32).sum(1) for parts in queries for q in parts]
    query_sum = functools.reduce(jnp.add, sums)  # [rows]

    arithmetic = arithmetics.PTX if ptx else arithmetics.PLAIN
    log2_e = math.log2(math.e)
    # Scores times this are exponents of 2, or, for the softcap, of what is in its tanh.
    plain_scale = scale * log2_e if softcap is None else scale * log2_e * 2 / softcap
    log2_scale: Any = plain_scale
    if keys.codes.scaling == "head":
        log2_scale *= backend.load(keys.parameters.at[head])
    value_scale = None
    if values.codes.scaling == "head":
        value_scale = backend.load(values.parameters.at[head])

    # A power of two on all weights cancels in the end. It keeps small ones, times the small steps
    # of values, out of float16's subnormals; a step is no more than 131008 / (2**bits - 1).
    lift = 0.0
    if dtype == jnp.float16:
        lift = (
            {8: 6.0, 4: 2.0, 2: 0.0}[values.codes.bits] if values.codes.scaling == "token" else 15.0
        )

    # Which operand of the tensor cores is the narrow one, eight high: a few rows, or, where there
    # are many, keys. Scores are [tile keys, rows] or [rows, tile keys].
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

    # Sums over keys. A narrow tile keeps one for each of its slots, so that the warps, between
    # which the slots are divided, meet once in the end instead of at every page.
    by_slot = config.tile_rows <= 16

    def gather(x: jax.Array) -> jax.Array:
        return x if by_slot else x.sum(slots, keepdims=True)

    residual = pages.residual
    end_packed = length  # the position where the tokens that wait begin
    if residual is not None:
        end_packed = residuals.begin(length, residual.page_size)

    def fold_channels(
        parts: list[jax.Array], tile: jax.Array, page: jax.Array, span: Span
    ) -> tuple[list[jax.Array], jax.Array]:
        """A span's queries times their channels' steps, and the sum of them times the middles."""
        assert keys.codes.group is not None
        group = tile * config.tile_keys % page_size // keys.codes.group
        scaled, products = [], []
        for plane, q in enumerate(parts):
            step, middle = fetch_channels(keys, head, page, group, span, plane, dtype)
            exact = q.astype(jnp.float32)
            scaled.append(arithmetic.narrow(exact * step[None], dtype))
            products.append(exact * middle[None])
        return scaled, functools.reduce(jnp.add, products).sum(1)

    def visit(tile: jax.Array, carry: Any, waiting: KVPages | None = None) -> Any:
        accumulators, middle_sum, peak, total = carry
        if waiting is None:
            tile_keys, tile_values = keys, values
            place = locate(tile, config.tile_keys, page_size, operands.block_tables, batch)
        else:
            tile_keys, tile_values = waiting.sides
            slot = tile * config.tile_keys - end_packed + jnp.arange(config.tile_keys)
            place = Place(batch, slot)
        channel_sums = []
        scores = jnp.zeros(tile_shape(config.tile_keys), jnp.float32)
        for span, parts in zip(key_spans, queries, strict=True):
            channels = fetch_operands(
                tile_keys, head, place, span, keys.codes.planes, dtype, axis=0, ptx=ptx
            )
            if tile_keys.codes.scaling == "channel":
                parts, channel_sum = fold_channels(parts, tile, place.page, span)
                channel_sums.append(channel_sum)
            for q, operand in zip(parts, channels, strict=True):
                scores += times_queries(operand, q)
        if tile_keys.codes.scaling == "token":
            # Scaled for each slot, of which there are fewer than scores.
            step, middle = (x * log2_scale for x in fetch_parameters(tile_keys, head, place, dtype))
            offset = for_slots(middle) * for_rows(query_sum)
            scores = arithmetic.multiply_add(scores, for_slots(step), offset)
        elif channel_sums:
            offset = for_rows(functools.reduce(jnp.add, channel_sums) * log2_scale)
            scores = arithmetic.multiply_add(scores, jnp.float32(log2_scale), offset)
        else:
            scores *= log2_scale
        if softcap is not None:  # tanh(x) = 1 − 2 / (1 + exp(2x))
            bound = softcap * log2_e
            scores = bound - 2 * bound * arithmetic.reciprocal(1 + arithmetic.exp2(scores))
        key = tile * config.tile_keys + jnp.arange(config.tile_keys)
        visible = for_slots(key) <= for_rows(limit)
        if window is not None:
            visible &= for_slots(key) > for_rows(position - window)
        scores = jnp.where(visible, scores, _HIDDEN)
        new_peak = jnp.maximum(peak, scores.max(slots))
        shrink = for_rows(arithmetic.exp2(peak - new_peak))
        weights = arithmetic.exp2(scores - for_rows(new_peak - lift))
        # What multiplies the codes is rounded to 16 bits. The total and the sum of middles must use
        # the same rounded weights: codes and middles may be large and all but cancel.
        if tile_values.codes.scaling == "token":
            step, middle = fetch_parameters(tile_values, head, place, dtype)
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
            if values.codes.scaling == "token":
                middle_sum *= shrink
        total = arithmetic.multiply_add(total, shrink, gather(rounded))
        old, new = iter(accumulators), []
        for span in value_spans:
            for operand in fetch_operands(
                tile_values, head, place, span, values.codes.planes, dtype, axis=across, ptx=ptx
            ):
                new.append(next(old) * shrink + times_values(weights, operand))
        return tuple(new), middle_sum, new_peak, total

    last_row = jnp.minimum(first_row + config.tile_rows, real_rows) - 1
    end = jnp.minimum(length, start + last_row // group + 1)
    end = jnp.where(first_row < real_rows, end, 0)  # without real rows there is nothing to read
    begin = jnp.int32(0)
    if window is not None:
        begin = jnp.maximum(0, start + first_row // group - window + 1)
    size = config.tile_keys
    first_tile, end_tile = begin // size, (end + size - 1) // size
    share = (end_tile - first_tile + config.splits - 1) // config.splits
    first = first_tile + split * share
    last = jnp.minimum(first + share, end_tile)
    # A sink is a score in the first range; where it is the largest of all, that is the peak.
    sink, has_sink = None, split == 0
    peak = jnp.full((config.tile_rows,), _FLOOR)
    if operands.sinks is not None:
        sink = backend.load_masked(operands.sinks.at[place_of_row[1]], row_mask)
        sink = sink.astype(jnp.float32) * log2_e
        peak = jnp.where(has_sink, sink, peak)
    zeros = jnp.zeros(tile_shape(size if by_slot else 1), jnp.float32)
    outputs = [(plane, span) for span in value_spans for plane in range(values.codes.planes)]
    carry = (
        tuple(jnp.zeros(tile_shape(span.size), jnp.float32) for _, span in outputs),
        zeros,
        peak,
        zeros,
    )
    if residual is None:
        carry = jax.lax.fori_loop(first, last, visit, carry)
    else:
        boundary = jnp.clip(end_packed // size, first, last)
        carry = jax.lax.fori_loop(first, boundary, visit, carry)
        carry = _one_by_one(boundary, last, functools.partial(visit, waiting=residual), carry)
    accumulators, middle_sum, peak, total = carry
    middle_sum, total = middle_sum.sum(slots), total.sum(slots)
    if sink is not None:
        total += jnp.where(has_sink, arithmetic.exp2(sink - peak + lift), 0.0)

    # An empty range has weight zero, and its output must be a number all the same.
    divisor = jnp.where(total == 0, 1.0, total)
    for (plane, span), accumulator in zip(outputs, accumulators, strict=True):
        out = (accumulator + for_rows(middle_sum)) / for_rows(divisor)
        if value_scale is not None:
            out *= value_scale
        channel = plane * value_width + span.lanes
        mask = row_mask[:, None] if span.mask is None else row_mask[:, None] & span.mask[None, :]
        token, query_head = (index[:, None] for index in place_of_row)
        target = out_ref.at[token, query_head, split, channel[None, :]]
        mask = jnp.broadcast_to(mask, target.shape)
        backend.store(target, (out.T if few else out).astype(out_ref.dtype), mask=mask)
    log2_total = jnp.where(total == 0, _FLOOR, peak + jnp.log2(divisor))
    backend.store(sums_ref.at[*place_of_row, split], log2_total, mask=row_mask)


def _one_by_one(first: jax.Array, last: jax.Array, body: Any, carry: Any) -> Any:
    """A loop that isn't pipelined: as many 16-bit tiles as packed ones would not fit."""
    return jax.lax.while_loop(
        lambda state: last > state[0],
        lambda state: (state[0] + 1, body(*state)),
        (first, carry),
    )[1]
