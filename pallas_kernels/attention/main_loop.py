"""The main loop of paged attention: one for decoding and for prompts, for every KV format.

Scales go where they are cheapest. In a narrow tile, of few rows, cached elements are more than
scores: they are decoded to what is exact in 16 bits, and what is linear is folded away from them:
with k = code·s + z, a score is s·(q · code) + z·Σq, and likewise for values, so a cached element
costs its decoding and its multiply-add in the tensor core (TurboMind section 3.4). Steps of
channels are in the operand, and their zeros meet the query once for every tile. In a wide tile,
keys and values are decoded to 16 bits with scale and zero, and the rest is as it is without codes.
What is decoded may be tiny, a code that stands in a subnormal: powers of two on queries, weights
and sums make up for it, and change nothing else.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import arithmetic as arithmetics
from pallas_kernels import backend
from pallas_kernels.arithmetic import times_power
from pallas_kernels.attention import tiles
from pallas_kernels.attention.combine import FLOOR
from pallas_kernels.attention.tiles import Part
from pallas_kernels.attention.tuning import AttentionConfig
from pallas_kernels.kv_cache.cache import KVPages

NARROW_ROWS = 16  # of a tile at most, in which scales are not applied to keys and values
# Of two: sums of smaller products would come near the end of float32. The powers that make up for
# it leave bfloat16's queries, steps and sums room up to 2**57, and steps down to 2**-57.
LEAST_EXPONENT = -64
SURPLUS_SLOTS = 16  # as few as the tensor cores take
_TINY = 1e-37  # smaller steps have no reciprocal


class Operands(NamedTuple):
    """What the kernel reads besides the pages; references, inside of it."""

    queries: Any  # [tokens, query heads, dim]
    block_tables: Any  # [batch, pages per sequence]
    starts: Any  # [batch]
    counts: Any  # [batch]
    offsets: Any  # [batch], of each sequence's first token among packed ones, or None
    sinks: Any  # [query heads] or None


class Sequence(NamedTuple):
    """Whose keys and queries a program reads."""

    batch: jax.Array
    head: jax.Array  # of keys and values
    start: jax.Array
    new_tokens: jax.Array


class Source(NamedTuple):
    """The keys that a program reads: every `programs`-th tile, from its own number on."""

    pages: KVPages
    block_tables: Any  # or None, where the page is the sequence's number
    begin: jax.Array  # position of the first token of the first page
    end: jax.Array  # position behind the last token
    tile_keys: int
    number: jax.Array
    programs: int
    split: jax.Array  # this program's number among those of all sources


def attend(
    operands: Operands,
    sequence: Sequence,
    source: Source,
    first_row: jax.Array,
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
    """Attends a tile of rows to the keys of a source, and stores the outputs and the log2 of sums.

    first_row: of the tile. longest: tokens that a sequence may have. The rest is as in
    `api.paged_attention`, and `ptx` whether there is inline assembly.
    """
    arithmetic = arithmetics.PTX if ptx else arithmetics.PLAIN
    pages, size = source.pages, source.tile_keys
    keys, values = pages.sides
    kv_heads, page_size = keys.words.shape[1:3]
    group, dtype = operands.queries.shape[1] // kv_heads, operands.queries.dtype
    batch, head, start, new_tokens = sequence
    row = first_row + jnp.arange(config.tile_rows)
    is_narrow = config.tile_rows <= NARROW_ROWS
    key_parts, value_parts = (
        tiles.parts(side.words.shape[3], side.codes.planes, joined=not is_narrow)
        for side in (keys, values)
    )
    real_rows = new_tokens * group
    if operands.offsets is None:
        first_token, row_mask = batch * longest, row < longest * group
    else:
        first_token, row_mask = backend.load(operands.offsets.at[batch]), row < real_rows
    # A row is a token and one of the query heads that share the KV head.
    place_of_row = first_token + row // group, head * group + row % group
    position = start + row // group  # [rows]
    limit = jnp.minimum(position, source.end - 1)  # the last visible key
    last_entry = jnp.maximum(source.end - 1, 0) // page_size  # of the block table, in use

    def locate_rows(part: Part) -> tuple[tuple[jax.Array, ...], jax.Array]:
        channel, mask = part.channels()
        mask = row_mask[:, None] if mask is None else row_mask[:, None] & mask[None, :]
        token, query_head = (index[:, None] for index in place_of_row)
        return (token, query_head, channel[None, :]), mask

    def left(side: Any) -> str | None:
        """Whose scales are not in the operands yet."""
        return side.codes.scaling if is_narrow or side.codes.scaling == "head" else None

    # Values in whose sums zeros of channels would be a second product: rather rounded.
    is_scaled = not is_narrow, not is_narrow or values.codes.scaling == "channel"
    key_exponents, value_exponents = (
        tiles.exponents(side, of_side, dtype, scaled=scaled, ptx=ptx)
        for side, of_side, scaled in zip(
            (keys, values), (key_parts, value_parts), is_scaled, strict=True
        )
    )
    score_exponent = max(min(key_exponents), LEAST_EXPONENT)
    shifts = [score_exponent - exponent for exponent in key_exponents]

    def times(q: jax.Array, exponent: int) -> jax.Array:
        return arithmetic.narrow(times_power(q.astype(jnp.float32), exponent), dtype)

    queries, query_sum = [], jnp.zeros(config.tile_rows)
    for part, shift in zip(key_parts, shifts, strict=True):
        index, mask = locate_rows(part)
        q = backend.load_masked(operands.queries.at[index], mask)
        if keys.codes.scaling == "static":
            channel, there = part.channels()
            scales = backend.load_masked(keys.parameters.at[head, channel], there)
            q = arithmetic.narrow(q.astype(jnp.float32) * scales[None], dtype)
        query_sum += q.astype(jnp.float32).sum(1)  # [rows]
        queries.append(times(q, shift))

    log2_e = math.log2(math.e)
    # Scores times this are exponents of 2, or, for the softcap, of what is in its tanh.
    plain_scale = scale * log2_e if softcap is None else scale * log2_e * 2 / softcap
    log2_scale: Any = plain_scale * 2.0**-score_exponent
    if keys.codes.scaling == "head":
        log2_scale *= backend.load(keys.parameters.at[head])

    value_scale = None
    if values.codes.scaling == "head":
        value_scale = backend.load(values.parameters.at[head])

    # A power of two on all weights cancels in the end. It keeps products with tiny values away from
    # the end of float32, and, in float16, small weights, times the small steps of values, out of
    # the subnormals; a step is no more than 131008 / (2**bits - 1).
    lift = max(0.0, float(LEAST_EXPONENT - min(value_exponents)))
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

    def visit(
        index: jax.Array, carry: Any, page: jax.Array | None = None, is_whole: bool = False
    ) -> Any:
        """One tile of keys. is_whole: that every row sees all of them."""
        accumulators, zero_sum, peak, total = carry
        tile = first_tile + index * source.programs
        place = tiles.locate(tile, size, page_size, source.block_tables, batch, last_entry, page)
        group = tile * size % page_size // (pages.format.group or page_size)
        fetch = functools.partial(
            tiles.operands, head=head, place=place, dtype=dtype, group=group, ptx=ptx
        )
        scores = jnp.zeros(tile_shape(size), jnp.float32)
        surplus = jnp.zeros(tile_shape(SURPLUS_SLOTS), jnp.float32)  # alike in all slots
        found = fetch(keys, parts=key_parts, axis=0, scaled=is_scaled[0])
        for part, q, operand in zip(key_parts, queries, found, strict=True):
            for term in operand.terms:
                scores += times_queries(term, q)
            for term in operand.surplus:
                surplus += times_queries(jnp.broadcast_to(term, (SURPLUS_SLOTS, part.size)), q)
        if not is_scaled[0] and keys.codes.scaling == "channel":
            scores -= for_rows(surplus.max(slots))
        factor = log2_scale
        if left(keys) == "token":
            # Scaled for each slot, of which there are fewer than scores.
            step, zero = tiles.fetch_parameters(keys, head, place, dtype)
            offset = for_slots(zero * plain_scale) * for_rows(query_sum)
            scores, factor = arithmetic.multiply_add(scores, for_slots(step * factor), offset), 1.0
        if softcap is not None:  # tanh(x) = 1 − 2 / (1 + exp(2x))
            scores, factor = scores * factor, 1.0
            bound = softcap * log2_e
            scores = bound - 2 * bound * arithmetic.reciprocal(1 + arithmetic.exp2(scores))
        if not is_whole:
            key = source.begin + tile * size + jnp.arange(size)
            visible = for_slots(key) <= for_rows(limit)
            if window is not None:
                visible &= for_slots(key) > for_rows(position - window)
            scores = jnp.where(visible, scores, -jnp.inf)
        new_peak = jnp.maximum(peak, scores.max(slots) * factor)
        shrink = for_rows(arithmetic.exp2(peak - new_peak))
        exponents = arithmetic.multiply_add(scores, jnp.float32(factor), for_rows(lift - new_peak))
        weights = arithmetic.exp2(exponents)
        if left(values) == "token":
            # What multiplies the codes is rounded to 16 bits. The total and the sum of zeros must
            # use the same rounded weights: codes and zeros may be large and all but cancel.
            step, zero = tiles.fetch_parameters(values, head, place, dtype)
            narrow = arithmetic.narrow(weights * for_slots(step), dtype)
            # Slots that were never written have a step of 0.
            inverse = jnp.where(step < _TINY, 0.0, arithmetic.reciprocal(step))
            weights = narrow.astype(jnp.float32) * for_slots(inverse)
            zero_sum = arithmetic.multiply_add(zero_sum, shrink, gather(weights * for_slots(zero)))
        else:
            narrow = arithmetic.narrow(weights, dtype)
        total = arithmetic.multiply_add(total, shrink, gather(weights))
        sums = []
        found = fetch(values, parts=value_parts, axis=across, scaled=is_scaled[1])
        for accumulator, operand in zip(accumulators, found, strict=True):
            [term] = operand.terms
            sums.append(accumulator * shrink + times_values(narrow, term))
        return tuple(sums), zero_sum, new_peak, total

    def visit_all(first: jax.Array, last: jax.Array, carry: Any, is_whole: bool = False) -> Any:
        """Tiles of the program's own, by their numbers."""
        see = functools.partial(visit, is_whole=is_whole)
        if source.block_tables is None or size > page_size:
            return jax.lax.fori_loop(first, last, see, carry)

        def some(number: jax.Array, carry: Any) -> Any:
            begin = first + number * tiles.LOOKED_UP
            own = first_tile + (begin + jnp.arange(tiles.LOOKED_UP)) * source.programs
            pages = tiles.look_up(own, size, page_size, source.block_tables, batch, last_entry)
            return jax.lax.fori_loop(
                begin,
                jnp.minimum(begin + tiles.LOOKED_UP, last),
                lambda index, carry: see(index, carry, tiles.pick(pages, index - begin)),
                carry,
            )

        most = -(-source.block_tables.shape[1] * page_size // (size * source.programs))
        if most <= tiles.LOOKED_UP:
            return some(jnp.int32(0), carry)
        groups = (last - first + tiles.LOOKED_UP - 1) // tiles.LOOKED_UP
        return jax.lax.fori_loop(0, groups, some, carry)

    # Positions from here on are those in the pages.
    last_row = jnp.minimum(first_row + config.tile_rows, real_rows) - 1
    end = jnp.minimum(source.end, start + last_row // group + 1) - source.begin
    end = jnp.where(first_row < real_rows, end, 0)  # without real rows there is nothing to read
    first_tile = source.number
    if window is not None:
        begin = start + first_row // group - window + 1 - source.begin
        first_tile += jnp.maximum(begin, 0) // size

    def tiles_below(tile: jax.Array) -> jax.Array:
        """How many of the program's tiles come before a tile."""
        return (jnp.maximum(tile - first_tile, 0) + source.programs - 1) // source.programs

    all_tiles = tiles_below((jnp.maximum(end, 0) + size - 1) // size)
    # A sink is a score of the first program; where it is the largest of all, that is the peak.
    sink, is_first = None, source.split == 0
    peak = jnp.full((config.tile_rows,), FLOOR)
    if operands.sinks is not None:
        sink = backend.load_masked(operands.sinks.at[place_of_row[1]], row_mask)
        sink = sink.astype(jnp.float32) * log2_e
        peak = jnp.where(is_first, sink, peak)
    zeros = jnp.zeros(tile_shape(size if is_narrow else 1), jnp.float32)
    carry = (
        tuple(jnp.zeros(tile_shape(part.size), jnp.float32) for part in value_parts),
        zeros,
        peak,
        zeros,
    )
    whole_tiles = jnp.int32(0)
    if not is_narrow and window is None:
        # Causality hides keys of the last tiles alone: the others need no masks.
        seen = jnp.minimum(source.end, start + first_row // group + 1) - source.begin
        whole_tiles = jnp.minimum(tiles_below(jnp.maximum(seen, 0) // size), all_tiles)
        carry = visit_all(jnp.int32(0), whole_tiles, carry, is_whole=True)
    carry = visit_all(whole_tiles, all_tiles, carry)
    accumulators, zero_sum, peak, total = carry
    zero_sum, total = zero_sum.sum(slots), total.sum(slots)
    if sink is not None:
        total += jnp.where(is_first, arithmetic.exp2(sink - peak + lift), 0.0)

    # A program without keys has weight zero, and its output must be a number all the same.
    divisor = jnp.where(total == 0, 1.0, total)
    for part, accumulator, exponent in zip(value_parts, accumulators, value_exponents, strict=True):
        out = (times_power(accumulator, -exponent) + for_rows(zero_sum)) / for_rows(divisor)
        if value_scale is not None:
            out *= value_scale
        if values.codes.scaling == "static":
            channel, there = part.channels()
            scales = backend.load_masked(values.parameters.at[head, channel], there)
            out *= for_slots(scales)
        (token, query_head, channel), mask = locate_rows(part)
        target = out_ref.at[token, query_head, source.split, channel]
        mask = jnp.broadcast_to(mask, target.shape)
        backend.store(target, (out.T if few else out).astype(out_ref.dtype), mask=mask)
    log2_total = jnp.where(total == 0, FLOOR, peak - lift + jnp.log2(divisor))
    backend.store(sums_ref.at[*place_of_row, source.split], log2_total, mask=row_mask)
