"""The main loop of paged attention: one for decoding and for prompts, for every KV format.

Scales go where they are cheapest. In a narrow tile, of up to 16 rows, cached elements are more than
scores: they are decoded to what is exact in 16 bits, and what is linear is folded away from them:
with k = code·s + z, a score is s·(q · code) + z·Σq, and likewise for values, so a cached element
costs its decoding and its multiply-add in the tensor core (TurboMind section 3.4). Steps and zeros
of a key's channels meet the query instead (`queries`). In a wide tile, keys and values are decoded
to 16 bits with scale and zero, and the rest is as it is without codes.
What is decoded may be tiny, a code that stands in a subnormal: powers of two on queries, weights
and sums make up for it, and change nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mpjax.kernels.arithmetic import LOG2_E
from mpjax.kernels.attention import queries, rows, tiles
from mpjax.kernels.attention.combine import FLOOR
from mpjax.kernels.attention.orientation import Orientation
from mpjax.kernels.attention.plans import NARROW_ROWS, AttentionConfig
from mpjax.kernels.attention.result import Result
from mpjax.kernels.attention.rows import Sequence
from mpjax.kernels.attention.source import Source
from mpjax.kernels.attention.tiles import Place
from mpjax.kernels.batch import Span
from mpjax.kernels.kv_cache.cache import Side
from mpjax.kernels.launch import load, load_masked
from mpjax.kernels.masks import Masks
from mpjax.kernels.target import current_target

# Of two: sums of smaller products would come near the end of float32. The powers that make up for
# it leave bfloat16's queries, steps, their products and sums room up to 2**57, and steps down to
# 2**-57.
LEAST_EXPONENT = -64
SINK_BITS = 24.0  # by which weights, or products with steps, may be less than a sink's, and count
_TINY = 1e-37  # smaller steps have no reciprocal
_ROUNDING, _MOST_ROUNDING = 2.0**-22, 14.0  # of an exponent: in parts of its summands, in bits
_Fetch = Callable[..., Iterator[list[jax.Array]]]  # of a side's parts in one tile


class Operands(NamedTuple):
    """What the kernel is given besides the pages; arrays are references, inside of it."""

    queries: Any  # [tokens, query heads, dim]
    span: Span
    offsets: Any  # [batch], of each sequence's first token among varlen ones, or None
    masks: Masks


class _Scores(NamedTuple):
    """Those of a tile, which times a factor, plus an offset of each row, are exponents of 2."""

    tile: jax.Array
    factor: Any = 1.0  # of all, or [rows]
    offset: jax.Array | None = None  # [rows]


class _Carry(NamedTuple):
    """What goes from one tile to the next."""

    sums: tuple[jax.Array, ...]  # of values times weights, for each part of their channels
    zero_sum: jax.Array  # of the values' zeros times weights; like `total`
    peak: jax.Array  # [rows], no exponent so far is larger
    total: jax.Array  # of weights; like a tile of `kept_slots`


class MainLoop:
    """Attends a tile of rows, from `first_row` on, to the keys of a source.

    after: what was found of other keys, to go on from, if values are 16 bits.
    """

    def __init__(
        self,
        operands: Operands,
        sequence: Sequence,
        source: Source,
        first_row: jax.Array,
        *,
        config: AttentionConfig,
        after: Result | None = None,
    ) -> None:
        masks = operands.masks
        self.source, self.sequence, self.first_row = source, sequence, first_row
        self.config, self.window, self.softcap = config, masks.window, masks.softcap
        self.target = current_target()
        self.keys, self.values = keys, values = source.pages.sides
        kv_heads, self.page_size = keys.words.shape[1:3]
        self.group = operands.queries.shape[1] // kv_heads
        self.dtype = operands.queries.dtype
        self.is_narrow = config.tile_rows <= NARROW_ROWS
        self.oriented = Orientation(few_rows=config.tile_rows <= 8)
        self.after, joined = after, not self.is_narrow
        self.key_parts = tiles.parts(keys, joined=joined)
        self.value_parts = after.parts if after else tiles.parts(values, joined=joined)
        number = first_row + jnp.arange(config.tile_rows)
        longest = operands.span.most_tokens
        self.rows = rows.numbered(number, sequence, self.group, longest, operands.offsets)
        # Every row sees the keys before this position.
        self.seen_by_all = jnp.minimum(source.end, sequence.start + first_row // self.group + 1)
        self.limit = jnp.minimum(self.rows.position, source.end - 1)  # the last visible key
        # The last entry of the block table that is in use.
        self.last_entry = jnp.maximum(source.end - 1, 0) // self.page_size
        # Enough for all warps to have slots of their own in the tensor cores, and none another's.
        slots = min(source.tile_keys, queries.MMA_SLOTS * config.warps)
        self.kept_slots = slots if self.is_narrow else 1
        self.scaled_keys = not self.is_narrow
        # Values in whose sums zeros of channels would be a second product: rather rounded.
        self.scaled_values = not self.is_narrow or values.codes.scaling == "channel"
        # What is added plainly, Triton leaves to the tensor cores.
        self.sums_apart = self.is_narrow and values.codes.sums_apart(self.dtype)
        self.has_channels = keys.codes.scaling == "channel"
        # Of what meets queries; `self.dtype` is that of what meets weights.
        self.key_dtype = jnp.dtype(jnp.float16) if self.has_channels else self.dtype
        key_exponents = tiles.exponents(
            keys, self.key_parts, self.key_dtype, scaled=self.scaled_keys
        )
        self.value_exponents = tiles.exponents(
            values, self.value_parts, self.dtype, scaled=self.scaled_values
        )
        score_exponent = max(min(key_exponents), LEAST_EXPONENT)
        # Of two: what queries are multiplied by, for each part.
        self.shifts = [score_exponent - exponent for exponent in key_exponents]
        self.queries = self._load_queries(operands.queries)
        # Scores times this are exponents of 2, or, for the softcap, of what is in its tanh.
        scale = masks.scale_for(operands.queries.shape[2])
        self.plain_scale: Any = scale * LOG2_E * (1 if self.softcap is None else 2 / self.softcap)
        self.score_scale: Any = self.plain_scale * 2.0**-score_exponent
        if keys.codes.scaling == "head":
            self.score_scale *= load(keys.parameters.at[sequence.head])
        if self.queries.unit is not None:
            self.plain_scale *= self.queries.unit
            self.score_scale *= self.queries.unit
        self.value_scale = None
        if values.codes.scaling == "head":
            self.value_scale = load(values.parameters.at[sequence.head])
        self.lift = self._lift()
        # Positions in the pages, from here on; without real rows there is nothing to read.
        last_row = jnp.minimum(first_row + config.tile_rows, self.rows.real) - 1
        end = jnp.minimum(source.end, sequence.start + last_row // self.group + 1) - source.begin
        end = jnp.where(first_row < self.rows.real, end, 0)
        begin = jnp.int32(0)
        if self.window is not None:
            begin = sequence.start + first_row // self.group - self.window + 1 - source.begin
        self.first_tile, self.all_tiles = source.tiles_between(begin, end)
        # A sink is a score of the first program.
        self.is_first, self.sink = source.split == 0, None
        if masks.sinks is not None:
            sink = load_masked(masks.sinks.at[self.rows.query_head], self.rows.mask)
            self.sink = jnp.maximum(sink.astype(jnp.float32) * LOG2_E, FLOOR)

    def _load_queries(self, queries_ref: Any) -> queries.Queries:
        """The rows' queries; with the scales that each channel of their keys is given."""
        keys, found = self.keys, []
        # Brief programs of other formats would pay more for the many loads than they save.
        in_pieces = self.has_channels and self.oriented.few_rows
        for part in self.key_parts:
            load = self.rows.load_few if in_pieces else self.rows.load
            q = load(queries_ref, part)
            if keys.codes.scaling == "static":
                channel, there = part.channels()
                scales = keys.parameters.at[self.sequence.head, channel]
                scales = load_masked(scales, there)
                q = self.target.narrow(q.astype(jnp.float32) * scales[None], self.dtype)
            found.append(q)
        largest = self.rows.largest(queries_ref) if self.has_channels else None
        return queries.prepare(found, self.shifts, self.key_dtype, largest=largest)

    def _lift(self) -> float:
        """A power of two on all weights, which cancels in the end.

        It keeps small ones out of float16's subnormals, and products with tiny values in float32.
        """
        if self.dtype == jnp.float16:
            return 15.0
        return max(0.0, float(LEAST_EXPONENT - min(self.value_exponents)))

    def _left(self, side: Side) -> str | None:
        """Whose scales are not in the operands yet."""
        is_left = self.is_narrow or side.codes.scaling == "head"
        return side.codes.scaling if is_left else None

    def run(self) -> Result:
        """All tiles that the program's rows see."""
        source, size, carry = self.source, self.source.tile_keys, self._begin()
        whole = jnp.int32(0)
        if not self.is_narrow and self.window is None:
            # Causality hides keys of the last tiles alone: the others need no masks.
            seen = jnp.maximum(self.seen_by_all - source.begin, 0)
            whole = jnp.minimum(source.tiles_below(seen // size, self.first_tile), self.all_tiles)
            carry = self._visit_all(jnp.int32(0), whole, carry, is_whole=True)
        return self._result(self._visit_all(whole, self.all_tiles, carry))

    def _begin(self) -> _Carry:
        """What the first tile is given."""
        zeros = self._zeros(self.kept_slots)
        if self.after is not None:
            assert not self.values.codes.is_quantized, "their sums would have other units"
            is_first = self.oriented.for_slots(jnp.arange(self.kept_slots) == 0)
            total = jnp.where(is_first, self.oriented.for_rows(self.after.total), zeros)
            return _Carry(self.after.sums, zeros, self.after.base + self.lift, total)
        peak = jnp.full((self.config.tile_rows,), FLOOR)
        if self.sink is not None:  # what is as much less as float16 holds must not vanish beside it
            peak = jnp.where(self.is_first, self.sink - SINK_BITS, peak)
        return _Carry(tuple(self._zeros(p.size) for p in self.value_parts), zeros, peak, zeros)

    def _zeros(self, slots: int) -> jax.Array:
        """A tile of so many slots, or channels."""
        return jnp.zeros(self.oriented.shape(slots, self.config.tile_rows), jnp.float32)

    def _visit_all(
        self, first: jax.Array, last: jax.Array, carry: _Carry, *, is_whole: bool = False
    ) -> _Carry:
        """Tiles of the program's own, by their numbers."""
        see = functools.partial(self._visit, is_whole=is_whole)
        return self.source.visit(first, last, self.first_tile, self.sequence.batch, see, carry)

    def _visit(
        self,
        index: jax.Array,
        carry: _Carry,
        page: jax.Array | None = None,
        *,
        is_whole: bool = False,
    ) -> _Carry:
        """One tile of keys. is_whole: that every row sees all of them."""
        source, size = self.source, self.source.tile_keys
        tile = self.first_tile + index * source.programs
        place = tiles.locate(
            tile,
            size,
            self.page_size,
            source.block_tables,
            self.sequence.batch,
            self.last_entry,
            page,
        )
        group = tile * size % self.page_size // (source.pages.format.group or self.page_size)
        place = place._replace(group=group, head=self.sequence.head)
        fetch = functools.partial(tiles.operands, place=place)
        scores = self._scores(place, fetch)
        if not is_whole:
            scores = scores._replace(tile=self._hide(scores.tile, source.begin + tile * size))
        return self._add_values(carry, scores, place, fetch)

    def _scores(self, place: Place, fetch: _Fetch) -> _Scores:
        """Scores of a tile of keys."""
        oriented, keys, target = self.oriented, self.keys, self.target
        scores, offset = self._zeros(self.source.tile_keys), None
        products = [[q] for q in self.queries.parts]
        if self._left(keys) == "channel":
            of_parts = (tiles.channel_parameters(keys, place, part) for part in self.key_parts)
            midpoint = None if self.dtype == jnp.float16 else (2**keys.codes.bits - 1) / 2
            products, offset = queries.times_channels(
                self.queries, of_parts, self.shifts, oriented, midpoint=midpoint
            )
            offset *= self.plain_scale
        found = fetch(
            keys,
            parts=self.key_parts,
            dtype=self.key_dtype,
            axis=0,
            scaled=self.scaled_keys,
            copies=len(products[0]),
        )
        for terms, operands in zip(products, found, strict=True):
            for q, operand in zip(terms, operands, strict=True):
                scores += oriented.times_queries(operand, q)
        factor = self.score_scale
        if self._left(keys) == "token":
            # Scaled for each slot, of which there are fewer than scores.
            step, zero = tiles.fetch_parameters(keys, place, self.dtype)
            zero = oriented.for_slots(zero * self.plain_scale)
            zeros = zero * oriented.for_rows(self.queries.sum)
            scores = target.multiply_add(scores, oriented.for_slots(step * factor), zeros)
            factor = 1.0
        if self.softcap is None:
            return _Scores(scores, factor, offset)
        scores *= oriented.for_rows(jnp.asarray(factor))
        if offset is not None:
            scores += oriented.for_rows(offset)
        bound = self.softcap * LOG2_E  # tanh(x) = 1 − 2 / (1 + exp(2x))
        scores = bound - 2 * bound * target.reciprocal(1 + target.exp2(scores))
        return _Scores(scores)

    def _hide(self, scores: jax.Array, first_key: jax.Array) -> jax.Array:
        """Scores of the keys from a position on, −∞ where a row does not see one."""
        oriented, size = self.oriented, self.source.tile_keys

        def hide(scores: jax.Array) -> jax.Array:
            key = oriented.for_slots(first_key + jnp.arange(size))
            visible = key <= oriented.for_rows(self.limit)
            if self.window is not None:
                visible &= key > oriented.for_rows(self.rows.position - self.window)
            return jnp.where(visible, scores, -jnp.inf)

        if self.window is not None or not self.is_narrow:
            return hide(scores)
        # Here, too, only the last tiles hide keys, but a second loop would wait for its first ones.
        return jax.lax.cond(first_key + size <= self.seen_by_all, lambda x: x, hide, scores)

    def _add_values(self, carry: _Carry, scores: _Scores, place: Place, fetch: _Fetch) -> _Carry:
        """What is carried on from a tile, whose values the scores weigh."""
        sums, zero_sum, peak, total = carry
        oriented, values, target = self.oriented, self.values, self.target
        for_slots, has_steps = oriented.for_slots, self._left(values) == "token"
        if has_steps:
            step, zero = tiles.fetch_parameters(values, place, self.dtype)
            step = jnp.maximum(step, _TINY)  # slots that were never written have a step of 0
        # Small weights times small steps would vanish in float16: there the largest product is 1.
        weighs_steps = has_steps and self.dtype == jnp.float16
        if weighs_steps:
            factor = oriented.for_rows(jnp.asarray(scores.factor, jnp.float32))
            tile = target.multiply_add(scores.tile, factor, for_slots(target.log2(step)))
            scores = _Scores(tile, offset=scores.offset)
        highest, base = scores.tile.max(oriented.slots) * scores.factor, jnp.float32(self.lift)
        if scores.offset is not None:
            highest, base = highest + scores.offset, base + scores.offset
        if self.dtype == jnp.float16:  # which ends a bit above the lift
            size = abs(highest) + (0 if scores.offset is None else abs(scores.offset))
            highest += jnp.minimum(size * _ROUNDING, _MOST_ROUNDING)
        new_peak = jnp.maximum(peak, highest)
        shrink = oriented.for_rows(target.exp2(peak - new_peak))
        factor = oriented.for_rows(jnp.asarray(scores.factor, jnp.float32))
        exponents = target.multiply_add(scores.tile, factor, oriented.for_rows(base - new_peak))
        weights = target.exp2(exponents)
        products = weights
        if has_steps:
            inverse = target.reciprocal(step)
            if weighs_steps:
                weights = products * for_slots(inverse)
            else:
                products = weights * for_slots(step)
        # What multiplies the codes is rounded to 16 bits.
        narrow = target.narrow(products, self.dtype)
        if has_steps:
            # With the same rounded weights: codes and zeros may be large and all but cancel.
            zeros = self._gather(target.widen(narrow) * for_slots(zero * inverse))
            zero_sum = target.multiply_add(zero_sum, shrink, zeros)
        total = target.multiply_add(total, shrink, self._gather(weights))
        axis = oriented.rows
        found = fetch(
            values, parts=self.value_parts, dtype=self.dtype, axis=axis, scaled=self.scaled_values
        )
        new_sums = []
        for of_part, [operand] in zip(sums, found, strict=True):
            product = oriented.times_values(narrow, operand)
            if self.sums_apart:
                new_sums.append(target.multiply_add(of_part, shrink, product))
            else:
                new_sums.append(of_part * shrink + product)
        return _Carry(tuple(new_sums), zero_sum, new_peak, total)

    def _gather(self, x: jax.Array) -> jax.Array:
        """Sums over keys. A narrow tile keeps one for each of `kept_slots`.

        So the warps, between which the slots are divided, meet once in the end, not at every page.
        """
        axis, kept = self.oriented.slots, self.kept_slots
        if kept == 1:
            return x.sum(axis, keepdims=True)
        if kept == x.shape[axis]:
            return x
        shape = (-1, kept, *x.shape[1:]) if axis == 0 else (*x.shape[:1], -1, kept)
        return x.reshape(shape).sum(axis)

    def _result(self, carry: _Carry) -> Result:
        """What is carried from the last tile, without this loop's units."""
        oriented, values = self.oriented, self.values
        zero_sum, total = carry.zero_sum.sum(oriented.slots), carry.total.sum(oriented.slots)
        if self.sink is not None:
            sink = self.target.exp2(self.sink - carry.peak + self.lift)
            total += jnp.where(self.is_first, sink, 0.0)
        sums = []
        for part, of_part, exponent in zip(
            self.value_parts, carry.sums, self.value_exponents, strict=True
        ):
            found = self.target.times_power(of_part, -exponent) + oriented.for_rows(zero_sum)
            if self.value_scale is not None:
                found *= self.value_scale
            if values.codes.scaling == "static":
                channel, there = part.channels()
                scales = values.parameters.at[self.sequence.head, channel]
                found *= oriented.for_slots(load_masked(scales, there))
            sums.append(found)
        base = carry.peak - self.lift
        return Result(tuple(sums), total, base, self.value_parts, self.rows, oriented)
