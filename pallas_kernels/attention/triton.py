"""Attention over the paged cache: one main loop for decoding and for prompts, for every KV format.

A program owns a tile of rows, the (token, query head) pairs that share a KV head, and one of
`splits` ranges of that sequence's pages; decoding is the case of one token. Scales go where they
are cheapest. In a narrow tile, of few rows, cached elements are more than scores: they are decoded
to what is exact in 16 bits, integers to such as are centred on zero, and what is linear is folded
away from them: with k = code·s + m, a score is s·(q · code) + m·Σq, and likewise for values, so a
cached element costs its decoding and its multiply-add in the tensor core (TurboMind section 3.4).
The scales and middles of channels are folded into the query, once for every tile, or for values
into its sums. In a wide tile, keys and values are decoded to 16 bits with scale and zero, and the
rest is as it is without codes.
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
from pallas_kernels.attention.combine import FLOOR, combine
from pallas_kernels.attention.tiles import (
    Part,
    Place,
    fetch_channels,
    fetch_parameters,
    locate,
    parts,
)
from pallas_kernels.attention.tiles import operands as fetch_operands
from pallas_kernels.kv_cache import residual as residuals
from pallas_kernels.kv_cache.cache import KVPages

NARROW_ROWS = 16  # of a tile at most, in which scales are not applied to keys and values
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
        outputs = combine(outputs, sums, queries.dtype, interpret=interpret)
    return outputs.reshape(queries.shape)


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
    arithmetic = arithmetics.PTX if ptx else arithmetics.PLAIN
    keys, values = pages.sides
    kv_heads, page_size = keys.words.shape[1:3]
    group, dtype = operands.queries.shape[1] // kv_heads, operands.queries.dtype
    batch, head = pl.program_id(1) // kv_heads, pl.program_id(1) % kv_heads
    split = pl.program_id(2)
    # The last tokens see the most keys: they come first, so that what ends last is short.
    first_row = (pl.num_programs(0) - 1 - backend.first_program_id()) * config.tile_rows
    row = first_row + jnp.arange(config.tile_rows)
    is_narrow = config.tile_rows <= NARROW_ROWS
    key_parts, value_parts = (
        parts(side.words.shape[3], side.codes.planes, joined=not is_narrow)
        for side in (keys, values)
    )
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

    def locate_rows(part: Part) -> tuple[tuple[jax.Array, ...], jax.Array]:
        channel, mask = part.channels()
        mask = row_mask[:, None] if mask is None else row_mask[:, None] & mask[None, :]
        token, query_head = (index[:, None] for index in place_of_row)
        return (token, query_head, channel[None, :]), mask

    queries = []
    for part in key_parts:
        index, mask = locate_rows(part)
        q = backend.load_masked(operands.queries.at[index], mask)
        if keys.codes.scaling == "static":
            channel, there = part.channels()
            scales = backend.load_masked(keys.parameters.at[head, channel], there)
            q = arithmetic.narrow(q.astype(jnp.float32) * scales[None], dtype)
        queries.append(q)
    sums = [q.astype(jnp.float32).sum(1) for q in queries]
    query_sum = functools.reduce(jnp.add, sums)  # [rows]

    log2_e = math.log2(math.e)
    # Scores times this are exponents of 2, or, for the softcap, of what is in its tanh.
    plain_scale = scale * log2_e if softcap is None else scale * log2_e * 2 / softcap
    log2_scale: Any = plain_scale
    if keys.codes.scaling == "head":
        log2_scale *= backend.load(keys.parameters.at[head])

    def left(side: Any) -> str | None:
        """Whose scales are not in the operands yet."""
        return side.codes.scaling if is_narrow or side.codes.scaling == "head" else None

    value_scale = None
    if values.codes.scaling == "head":
        value_scale = backend.load(values.parameters.at[head])

    # A power of two on all weights cancels in the end. It keeps small ones, times the small steps
    # of values, out of float16's subnormals; a step is no more than 131008 / (2**bits - 1).
    lift = 0.0
    if dtype == jnp.float16:
        lift = {8: 6.0, 4: 2.0, 2: 0.0}[values.codes.bits] if left(values) == "token" else 15.0

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

    def gather(x: jax.Array) -> jax.Array:
        """Sums over keys. A narrow tile keeps one for each of its slots.

        So the warps, between which the slots are divided, meet once in the end, not at every page.
        """
        return x if is_narrow else x.sum(slots, keepdims=True)

    residual = pages.residual
    end_packed = length  # the position where the tokens that wait begin
    if residual is not None:
        end_packed = residuals.begin(length, residual.page_size)

    def fold_channels(
        q: jax.Array, part: Part, page: jax.Array, group: jax.Array
    ) -> tuple[list[jax.Array], jax.Array]:
        """A part's queries times their channels' steps, and the sum of them times the middles.

        The former as two terms: rounded once, a channel of large keys would be off by as much.
        """
        step, middle = fetch_channels(keys, head, page, group, part, dtype)
        exact = q.astype(jnp.float32)
        scaled = exact * step[None]
        rounded = arithmetic.narrow(scaled, dtype)
        rest = arithmetic.narrow(scaled - rounded.astype(jnp.float32), dtype)
        return [rounded, rest], (exact * middle[None]).sum(1)

    def visit(
        tile: jax.Array, carry: Any, waiting: KVPages | None = None, is_whole: bool = False
    ) -> Any:
        """One tile of keys. is_whole: that every row sees all of them."""
        accumulators, middle_sum, peak, total = carry
        if waiting is None:
            tile_keys, tile_values = keys, values
            place = locate(tile, config.tile_keys, page_size, operands.block_tables, batch)
        else:
            tile_keys, tile_values = waiting.sides
            slot = tile * config.tile_keys - end_packed + jnp.arange(config.tile_keys)
            place = Place(batch, slot)
        group = tile * config.tile_keys % page_size // (pages.format.group or page_size)
        fetch = functools.partial(
            fetch_operands, head=head, place=place, dtype=dtype, scaled=not is_narrow, ptx=ptx
        )
        channel_sums = []
        scores = jnp.zeros(tile_shape(config.tile_keys), jnp.float32)
        channels = fetch(tile_keys, parts=key_parts, axis=0, group=group)
        for part, q, operand in zip(key_parts, queries, channels, strict=True):
            terms = [q]
            if left(tile_keys) == "channel":
                terms, channel_sum = fold_channels(q, part, place.page, group)
                channel_sums.append(channel_sum)
            for term in terms:
                scores += times_queries(operand, term)
        factor = log2_scale
        if left(tile_keys) == "token":
            # Scaled for each slot, of which there are fewer than scores.
            step, middle = (x * factor for x in fetch_parameters(tile_keys, head, place, dtype))
            offset = for_slots(middle) * for_rows(query_sum)
            scores, factor = arithmetic.multiply_add(scores, for_slots(step), offset), 1.0
        elif channel_sums:
            offset = for_rows(functools.reduce(jnp.add, channel_sums) * factor)
            scores, factor = arithmetic.multiply_add(scores, jnp.float32(factor), offset), 1.0
        elif softcap is not None:
            scores, factor = scores * factor, 1.0
        if softcap is not None:  # tanh(x) = 1 − 2 / (1 + exp(2x))
            bound = softcap * log2_e
            scores = bound - 2 * bound * arithmetic.reciprocal(1 + arithmetic.exp2(scores))
        if not is_whole:
            key = tile * config.tile_keys + jnp.arange(config.tile_keys)
            visible = for_slots(key) <= for_rows(limit)
            if window is not None:
                visible &= for_slots(key) > for_rows(position - window)
            scores = jnp.where(visible, scores, -jnp.inf)
        new_peak = jnp.maximum(peak, scores.max(slots) * factor)
        shrink = for_rows(arithmetic.exp2(peak - new_peak))
        exponents = arithmetic.multiply_add(scores, jnp.float32(factor), for_rows(lift - new_peak))
        weights = arithmetic.exp2(exponents)
        if left(tile_values) == "token":
            # What multiplies the codes is rounded to 16 bits. The total and the sum of middles must
            # use the same rounded weights: codes and middles may be large and all but cancel.
            step, middle = fetch_parameters(tile_values, head, place, dtype)
            narrow = arithmetic.narrow(weights * for_slots(step), dtype)
            # Slots that were never written have a step of 0.
            inverse = jnp.where(step < _TINY, 0.0, arithmetic.reciprocal(step))
            weights = narrow.astype(jnp.float32) * for_slots(inverse)
            middle_sum = arithmetic.multiply_add(
                middle_sum, shrink, gather(weights * for_slots(middle))
            )
        else:
            narrow = arithmetic.narrow(weights, dtype)
            if left(values) == "token":  # all but what waits, which has no middles
                middle_sum *= shrink
            if left(values) in ("token", "channel"):
                weights = narrow.astype(jnp.float32)
        total = arithmetic.multiply_add(total, shrink, gather(weights))
        sums = []
        channels = fetch(tile_values, parts=value_parts, axis=across, group=group)
        for part, accumulator, operand in zip(value_parts, accumulators, channels, strict=True):
            product = times_values(narrow, operand)
            if left(tile_values) == "channel":
                step, middle = fetch_channels(values, head, place.page, group, part, dtype)
                offset = for_slots(middle) * for_rows(weights.sum(slots))
                product = arithmetic.multiply_add(product, for_slots(step), offset)
            sums.append(accumulator * shrink + product)
        return tuple(sums), middle_sum, new_peak, total

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
    peak = jnp.full((config.tile_rows,), FLOOR)
    if operands.sinks is not None:
        sink = backend.load_masked(operands.sinks.at[place_of_row[1]], row_mask)
        sink = sink.astype(jnp.float32) * log2_e
        peak = jnp.where(has_sink, sink, peak)
    zeros = jnp.zeros(tile_shape(size if is_narrow else 1), jnp.float32)
    carry = (
        tuple(jnp.zeros(tile_shape(part.size), jnp.float32) for part in value_parts),
        zeros,
        peak,
        zeros,
    )
    boundary = last if residual is None else jnp.clip(end_packed // size, first, last)
    if not is_narrow and window is None:
        # Causality hides keys of the last tiles alone: the others need no masks.
        seen = jnp.minimum(length, start + first_row // group + 1)
        whole = jnp.clip(seen // size, first, boundary)
        carry = jax.lax.fori_loop(first, whole, functools.partial(visit, is_whole=True), carry)
        first = whole
    carry = jax.lax.fori_loop(first, boundary, visit, carry)
    if residual is not None:
        carry = _one_by_one(boundary, last, functools.partial(visit, waiting=residual), carry)
    accumulators, middle_sum, peak, total = carry
    middle_sum, total = middle_sum.sum(slots), total.sum(slots)
    if sink is not None:
        total += jnp.where(has_sink, arithmetic.exp2(sink - peak + lift), 0.0)

    # An empty range has weight zero, and its output must be a number all the same.
    divisor = jnp.where(total == 0, 1.0, total)
    for part, accumulator in zip(value_parts, accumulators, strict=True):
        out = (accumulator + for_rows(middle_sum)) / for_rows(divisor)
        if value_scale is not None:
            out *= value_scale
        if values.codes.scaling == "static":
            channel, there = part.channels()
            scales = backend.load_masked(values.parameters.at[head, channel], there)
            out *= for_slots(scales)
        (token, query_head, channel), mask = locate_rows(part)
        target = out_ref.at[token, query_head, split, channel]
        mask = jnp.broadcast_to(mask, target.shape)
        backend.store(target, (out.T if few else out).astype(out_ref.dtype), mask=mask)
    log2_total = jnp.where(total == 0, FLOOR, peak + jnp.log2(divisor))
    backend.store(sums_ref.at[*place_of_row, split], log2_total, mask=row_mask)


def _one_by_one(first: jax.Array, last: jax.Array, body: Any, carry: Any) -> Any:
    """A loop that isn't pipelined: as many 16-bit tiles as packed ones would not fit."""
    return jax.lax.while_loop(
        lambda state: last > state[0],
        lambda state: (state[0] + 1, body(*state)),
        (first, carry),
    )[1]
