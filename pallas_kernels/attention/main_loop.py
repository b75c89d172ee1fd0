"""The main loop of paged attention: one for decoding and for prefill, for every KV format.

Scales are applied where that is cheapest. In a narrow tile, of up to 16 rows, there are more cached
elements than scores. So codes are decoded to exact 16-bit operands, and scales and zeros are
factored out: with a key k = code·s + z, a score is s·(q · code) + z·Σq. A value's scale multiplies
its softmax weight, and its zero a sum of weights. A cached element then costs its decoding and a
multiply-add in the tensor core (TurboMind section 3.4). Steps and zeros of key channels are
applied to the query instead (`queries`). In a wide tile, keys and values are decoded to 16 bits
with scale and zero applied, and the loop is that of unquantised keys and values.

Decoded operands may be tiny, since codes may be decoded as mantissas of subnormals. Powers of two
on queries, weights and sums compensate for that without rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mpjax.kernels.arithmetic import LOG2_E
from mpjax.kernels.attention import queries, rows, tiles
from mpjax.kernels.attention.combine import FLOOR
from mpjax.kernels.attention.key_range import KeyRange
from mpjax.kernels.attention.orientation import Orientation
from mpjax.kernels.attention.plans import NARROW_ROWS, AttentionConfig
from mpjax.kernels.attention.rows import SequenceHead
from mpjax.kernels.attention.softmax_partial import SoftmaxPartial
from mpjax.kernels.attention.tiles import Part, Place
from mpjax.kernels.batch import Span
from mpjax.kernels.kv_cache.cache import Side
from mpjax.kernels.launch import load, load_masked
from mpjax.kernels.masks import Masks
from mpjax.kernels.target import current_target

# Decoded operands are values times 2**exponent, down to 2**-133. Queries or weights are multiplied
# by up to 2**69, so that products have at least this exponent: with a smaller one, their float32
# sums could become subnormal. So in bfloat16, queries, scales of codes (steps), their products and
# sums may be up to 2**57, and steps no smaller than 2**-57.
LEAST_EXPONENT = -64
# Weights, or their products with steps, must count unless they are 2**SINK_BITS below a sink's.
SINK_BITS = 24.0
_LEAST_STEP = 1e-37  # smaller steps have no reciprocal
# Bounds of the rounding error of an exponent: relative to its summands, and in bits.
_ROUNDING, _MOST_ROUNDING = 2.0**-22, 14.0
LoadOperands = Callable[..., Iterator[list[jax.Array]]]  # `tiles.operands` of one tile


class Operands(NamedTuple):
    """The kernel's inputs besides the pages; inside the kernel, arrays are references."""

    queries: Any  # [tokens, query heads, dim], the tokens of all sequences
    span: Span
    offsets: Any  # int32 [batch], each sequence's first token among varlen tokens; or None
    masks: Masks
    bits: Any = None  # widths of the blocks to which outputs are rounded
    rotated: Any = None  # [tokens, query heads, channels], LatentQueries.rotated


class Scores(NamedTuple):
    """The scores of a tile: tile · factor + offset is the logarithm to base 2 of a weight."""

    tile: jax.Array
    factor: Any = 1.0  # a scalar, or [rows]
    offset: jax.Array | None = None  # [rows]; None for 0


class _Carry(NamedTuple):
    """The running softmax that is carried from tile to tile, float32."""

    sums: tuple[jax.Array, ...]  # of values times weights: a tile for each part of their channels
    zero_sum: jax.Array  # of the values' zeros times weights, of the shape of `total`
    peak: jax.Array  # [rows], at least every score so far, to base 2
    total: jax.Array  # sums of weights: a tile of `kept_slots` and rows


class MainLoop:
    """Attention of a tile of rows to the keys of a KeyRange; inside a kernel.

    The constructor loads the queries, and computes all that is the same for every tile of keys: the
    keys that each row attends to, how operands are decoded and scaled, and the tiles to visit.
    `run` is the loop over these tiles.

    sequence: the sequence and KV head.
    first_row: the index of the tile's first row in its sequence.
    after: the partial softmax over other keys, to continue from; only if values are in 16 bits.

    name: of the kernel.
    narrow_rows, few_rows: the most rows of a narrow tile, and of one whose rows lie along the
        narrow side of the tensor cores' instruction.
    """

    name = "attention"
    narrow_rows, few_rows = NARROW_ROWS, 8

    def __init__(
        self,
        operands: Operands,
        sequence: SequenceHead,
        key_range: KeyRange,
        first_row: jax.Array,
        *,
        config: AttentionConfig,
        after: SoftmaxPartial | None = None,
    ) -> None:
        masks = operands.masks
        self.key_range, self.sequence, self.first_row = key_range, sequence, first_row
        self.config, self.masks, self.softcap = config, masks, masks.softcap
        self.target = current_target()
        self.keys, self.values = keys, values = self.sides
        kv_heads, self.page_size = keys.words.shape[1:3]
        self.group = operands.queries.shape[1] // kv_heads  # query heads that share a KV head
        self.dtype = operands.queries.dtype  # of softmax weights and decoded values, too
        self.is_narrow = config.tile_rows <= self.narrow_rows
        self.oriented = Orientation(few_rows=config.tile_rows <= self.few_rows)

        # The parts of a head's channels: each is decoded to one operand of the tensor cores. Sums
        # that are continued from `after` have the same parts.
        self.after, joined = after, not self.is_narrow
        self.key_parts = self._parts(keys, joined=joined)
        self.value_parts = after.parts if after else self._parts(values, joined=joined)

        # The tile's rows, and the keys that they attend to.
        number = first_row + jnp.arange(config.tile_rows)
        longest = operands.span.most_tokens
        self.rows = rows.rows_of(number, sequence, self.group, longest, operands.offsets)
        # All rows attend to all keys before this position.
        self.seen_by_all = jnp.minimum(key_range.end, sequence.start + first_row // self.group + 1)
        self.limit = jnp.minimum(self.rows.position, key_range.end - 1)  # each row's last key
        # The last used entry of the block table.
        self.last_entry = jnp.maximum(key_range.end - 1, 0) // self.page_size
        # Sums over keys are kept as this many partial sums: see `_sum_keys`.
        slots = min(key_range.tile_keys, queries.MMA_SLOTS * config.warps)
        self.kept_slots = slots if self.is_narrow else 1

        # Whether decoding applies the scales and zeros of tokens and channels. If not, operands are
        # codes, and scales are applied to scores, weights and queries.
        self.scaled_keys = not self.is_narrow
        # Zeros of value channels would need a second product: they are applied when decoding.
        self.scaled_values = not self.is_narrow or values.codes.scaling == "channel"
        # Whether float32 instructions add the product of a tile's values to the running sum, since
        # the tensor cores would truncate it. Triton fuses a plain `sum + dot` into the product.
        self.sums_apart = self.is_narrow and values.codes.sums_apart(self.dtype)
        self.has_channels = keys.codes.scaling == "channel"
        self.key_dtype = jnp.dtype(jnp.float16) if self.has_channels else self.dtype  # as decoded

        # A decoded operand is its exact value times a power of two, which may differ from part to
        # part. Queries are multiplied by powers of two that give all parts' products one exponent.
        key_exponents = tiles.exponents(
            keys, self.key_parts, self.key_dtype, scaled=self.scaled_keys
        )
        self.value_exponents = tiles.exponents(
            values, self.value_parts, self.dtype, scaled=self.scaled_values
        )
        score_exponent = max(min(key_exponents), LEAST_EXPONENT)
        self.shifts = [score_exponent - exponent for exponent in key_exponents]
        self.queries = self._load_queries(operands.queries)

        # Products of queries and keys times `score_scale` are scores to base 2, or with a softcap
        # the exponents of 2 in its tanh. `plain_scale` applies to products without powers of two.
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

        # The tiles of keys to visit. Here positions count from the range's first page. A tile of
        # padding rows visits no keys.
        last_row = jnp.minimum(first_row + config.tile_rows, self.rows.real) - 1
        end = (
            jnp.minimum(key_range.end, sequence.start + last_row // self.group + 1)
            - key_range.begin
        )
        end = jnp.where(first_row < self.rows.real, end, 0)
        begin = jnp.int32(0)
        if masks.window is not None:
            begin = masks.first_key(sequence.start + first_row // self.group) - key_range.begin
        self.first_tile, self.all_tiles = key_range.tiles_between(begin, end)

        # The sequence's first program adds the sink to its total of weights.
        self.is_first, self.sink = key_range.split == 0, None
        if masks.sinks is not None:
            sink = load_masked(masks.sinks.at[self.rows.query_head], self.rows.mask)
            self.sink = jnp.maximum(sink.astype(jnp.float32) * LOG2_E, FLOOR)

    @property
    def sides(self) -> tuple[Side, Side]:
        """The keys and the values."""
        return self.key_range.pages.sides

    def _parts(self, side: Side, *, joined: bool) -> Sequence[Part]:
        """The parts of a head's channels for one side; see `tiles.parts`."""
        return tiles.parts(side, joined=joined)

    def _added(self, scores: jax.Array, product: jax.Array) -> jax.Array:
        """Adds the product of another part to scores, in the tensor cores."""
        return scores + product

    def _load_queries(self, queries_ref: Any) -> queries.Queries:
        """Loads and prepares the rows' queries, times the static scales of key channels, if any."""
        keys, loaded = self.keys, []
        # Without key channels, programs that end soon lose more by the additional loads than they
        # save.
        in_pieces = self.has_channels and self.oriented.few_rows
        for part in self.key_parts:
            load = self.rows.load_few if in_pieces else self.rows.load
            q = load(queries_ref, part)
            if keys.codes.scaling == "static":
                channel, mask = part.channels()
                scales = keys.parameters.at[self.sequence.head, channel]
                scales = load_masked(scales, mask)
                q = self.target.narrow(q.astype(jnp.float32) * scales[None], self.dtype)
            loaded.append(q)
        largest = self.rows.largest(queries_ref) if self.has_channels else None
        return queries.prepare(loaded, self.shifts, self.key_dtype, largest=largest)

    def _lift(self) -> float:
        """The exponent of a power of two on all softmax weights, which `_partial` undoes.

        It keeps small weights above float16's subnormals, and products of weights and tiny decoded
        values in the range of float32.
        """
        if self.dtype == jnp.float16:
            return 15.0
        return max(0.0, float(LEAST_EXPONENT - min(self.value_exponents)))

    def _folded_scaling(self, side: Side) -> str | None:
        """The scaling applied to scores, weights or queries instead of in decoding, or None.

        side: the keys or the values.
        """
        is_folded = self.is_narrow or side.codes.scaling == "head"
        return side.codes.scaling if is_folded else None

    def run(self) -> SoftmaxPartial:
        """The partial softmax over all keys of the range that the program's rows attend to."""
        key_range, size, carry = self.key_range, self.key_range.tile_keys, self._begin()
        whole = jnp.int32(0)
        if not self.is_narrow and self.masks.window is None:
            # Causality hides keys only in the last tiles: a first loop over the other tiles needs
            # no masks.
            seen = jnp.maximum(self.seen_by_all - key_range.begin, 0)
            whole = jnp.minimum(
                key_range.tiles_below(seen // size, self.first_tile), self.all_tiles
            )
            carry = self._visit_all(jnp.int32(0), whole, carry, is_whole=True)
        return self._partial(self._visit_all(whole, self.all_tiles, carry))

    def _begin(self) -> _Carry:
        """The running softmax before the first tile."""
        zeros = self._zeros(self.kept_slots)
        if self.after is not None:
            assert not self.values.codes.is_quantized, "sums of codes would have other units"
            is_first = self.oriented.for_slots(jnp.arange(self.kept_slots) == 0)
            total = jnp.where(is_first, self.oriented.for_rows(self.after.total), zeros)
            return _Carry(self.after.sums, zeros, self.after.base + self.lift, total)
        peak = jnp.full((self.config.tile_rows,), FLOOR)
        if self.sink is not None:
            # Weights that are below the sink's but representable beside it in float16 must count.
            peak = jnp.where(self.is_first, self.sink - SINK_BITS, peak)
        return _Carry(tuple(self._zeros(p.size) for p in self.value_parts), zeros, peak, zeros)

    def _zeros(self, slots: int) -> jax.Array:
        """A float32 tile of zeros, of `slots` slots or channels."""
        return jnp.zeros(self.oriented.shape(slots, self.config.tile_rows), jnp.float32)

    def _visit_all(
        self, first: jax.Array, last: jax.Array, carry: _Carry, *, is_whole: bool = False
    ) -> _Carry:
        """Visits the program's tiles from index `first` to before `last`."""
        see = functools.partial(self._visit, is_whole=is_whole)
        return self.key_range.visit(first, last, self.first_tile, self.sequence.batch, see, carry)

    def _visit(
        self,
        index: jax.Array,
        carry: _Carry,
        page: jax.Array | None = None,
        *,
        is_whole: bool = False,
    ) -> _Carry:
        """Adds a tile of keys and values to the running softmax.

        index: of the tile among the program's tiles.
        page: the tile's page, if the tile is a piece of one.
        is_whole: whether every row is known to attend to all keys of the tile.
        """
        key_range, size = self.key_range, self.key_range.tile_keys
        tile = self.first_tile + index * key_range.programs
        place = tiles.locate(
            tile,
            size,
            self.page_size,
            key_range.block_tables,
            self.sequence.batch,
            self.last_entry,
            page,
        )
        group = tile * size % self.page_size // (key_range.pages.format.group or self.page_size)
        place = place._replace(group=group, head=self.sequence.head)
        load_operands = self._loader(place)
        scores = self._scores(place, load_operands)
        if not is_whole:
            scores = scores._replace(tile=self._hide(scores.tile, key_range.begin + tile * size))
        return self._add_values(carry, scores, place, load_operands)

    def _loader(self, place: Place) -> LoadOperands:
        """A function that loads and decodes tiles of keys and of values at a place."""
        return functools.partial(tiles.operands, place=place)

    def _scores(self, place: Place, load_operands: LoadOperands) -> Scores:
        """The scores of a tile of keys, scaled and capped, not masked."""
        oriented, keys, target = self.oriented, self.keys, self.target
        scores, offset = self._zeros(self.key_range.tile_keys), None
        products = [[q] for q in self.queries.parts]
        if self._folded_scaling(keys) == "channel":
            parameters = (tiles.channel_parameters(keys, place, part) for part in self.key_parts)
            midpoint = None if self.dtype == jnp.float16 else (2**keys.codes.bits - 1) / 2
            products, offset = queries.times_channels(
                self.queries, parameters, self.shifts, oriented, midpoint=midpoint
            )
            offset *= self.plain_scale
        loaded = load_operands(
            keys,
            parts=self.key_parts,
            dtype=self.key_dtype,
            axis=0,
            scaled=self.scaled_keys,
            copies=len(products[0]),
        )
        for terms, operands in zip(products, loaded, strict=True):
            for q, operand in zip(terms, operands, strict=True):
                scores = self._added(scores, oriented.times_queries(operand, q))
        factor = self.score_scale
        if self._folded_scaling(keys) == "token":
            # The factor is applied to steps, since there are fewer steps than scores.
            step, zero = tiles.token_parameters(keys, place, self.dtype)
            zero = oriented.for_slots(zero * self.plain_scale)
            zeros = zero * oriented.for_rows(self.queries.sum)
            scores = target.multiply_add(scores, oriented.for_slots(step * factor), zeros)
            factor = 1.0
        if self.softcap is None:
            return Scores(scores, factor, offset)
        scores *= oriented.for_rows(jnp.asarray(factor))
        if offset is not None:
            scores += oriented.for_rows(offset)
        bound = self.softcap * LOG2_E  # tanh(x) = 1 − 2 / (1 + exp(2x))
        scores = bound - 2 * bound * target.reciprocal(1 + target.exp2(scores))
        return Scores(scores)

    def _hide(self, scores: jax.Array, first_key: jax.Array) -> jax.Array:
        """The scores, with −∞ for keys that a row does not attend to.

        first_key: the position of the tile's first key.
        """
        oriented, size = self.oriented, self.key_range.tile_keys

        def hide(scores: jax.Array) -> jax.Array:
            key = oriented.for_slots(first_key + jnp.arange(size))
            visible = key <= oriented.for_rows(self.limit)
            if self.masks.window is not None:
                visible &= key >= oriented.for_rows(self.masks.first_key(self.rows.position))
            return jnp.where(visible, scores, -jnp.inf)

        if self.masks.window is not None or not self.is_narrow:
            return hide(scores)
        # Only the last tiles have hidden keys, as in `run`. But in narrow tiles, the pipeline of a
        # second loop would stall on its first tiles, so each tile has a branch instead.
        return jax.lax.cond(first_key + size <= self.seen_by_all, lambda x: x, hide, scores)

    def _add_values(
        self, carry: _Carry, scores: Scores, place: Place, load_operands: LoadOperands
    ) -> _Carry:
        """Adds a tile's values, weighted by its scores, to the running softmax."""
        sums, zero_sum, peak, total = carry
        oriented, values, target = self.oriented, self.values, self.target
        for_slots, has_steps = oriented.for_slots, self._folded_scaling(values) == "token"
        if has_steps:
            step, zero = tiles.token_parameters(values, place, self.dtype)
            step = jnp.maximum(step, _LEAST_STEP)  # slots never written have step 0
        # In float16, small weights times small steps would underflow. There the peak includes
        # steps, so that the largest product of a weight and a step is 1.
        weighs_steps = has_steps and self.dtype == jnp.float16
        if weighs_steps:
            factor = oriented.for_rows(jnp.asarray(scores.factor, jnp.float32))
            tile = target.multiply_add(scores.tile, factor, for_slots(target.log2(step)))
            scores = Scores(tile, offset=scores.offset)
        highest, base = scores.tile.max(oriented.slots) * scores.factor, jnp.float32(self.lift)
        if scores.offset is not None:
            highest, base = highest + scores.offset, base + scores.offset
        if self.dtype == jnp.float16:
            # Weights reach 2**lift = 2**15, and float16 ends below 2**16. The peak is raised by the
            # rounding error of the exponents, so that no weight overflows.
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
        # The operand that multiplies the codes is rounded to 16 bits.
        narrow = target.narrow(products, self.dtype)
        if has_steps:
            # Zeros use the same rounded weights: codes and zeros may be large and nearly cancel.
            zeros = self._sum_keys(target.widen(narrow) * for_slots(zero * inverse))
            zero_sum = target.multiply_add(zero_sum, shrink, zeros)
        total = target.multiply_add(total, shrink, self._sum_keys(weights))
        axis = oriented.rows
        loaded = load_operands(
            values, parts=self.value_parts, dtype=self.dtype, axis=axis, scaled=self.scaled_values
        )
        new_sums = []
        for part_sum, [operand] in zip(sums, loaded, strict=True):
            product = oriented.times_values(narrow, operand)
            if self.sums_apart:
                new_sums.append(target.multiply_add(part_sum, shrink, product))
            else:
                new_sums.append(part_sum * shrink + product)
        return _Carry(tuple(new_sums), zero_sum, new_peak, total)

    def _sum_keys(self, x: jax.Array) -> jax.Array:
        """Sums a tile over its keys (its axis of slots), to `kept_slots` partial sums.

        The keys of a narrow tile are distributed over the warps, so with partial sums warps
        exchange data once, after the last tile, instead of for every tile.
        """
        axis, kept = self.oriented.slots, self.kept_slots
        if kept == 1:
            return x.sum(axis, keepdims=True)
        if kept == x.shape[axis]:
            return x
        shape = (-1, kept, *x.shape[1:]) if axis == 0 else (*x.shape[:1], -1, kept)
        return x.reshape(shape).sum(axis)

    def _partial(self, carry: _Carry) -> SoftmaxPartial:
        """The partial softmax after the last tile, without powers of two and with folded scales."""
        oriented, values = self.oriented, self.values
        zero_sum, total = carry.zero_sum.sum(oriented.slots), carry.total.sum(oriented.slots)
        if self.sink is not None:
            sink = self.target.exp2(self.sink - carry.peak + self.lift)
            total += jnp.where(self.is_first, sink, 0.0)
        sums = []
        for part, part_sum, exponent in zip(
            self.value_parts, carry.sums, self.value_exponents, strict=True
        ):
            total_sum = self.target.times_power(part_sum, -exponent) + oriented.for_rows(zero_sum)
            if self.value_scale is not None:
                total_sum *= self.value_scale
            if values.codes.scaling == "static":
                channel, mask = part.channels()
                scales = values.parameters.at[self.sequence.head, channel]
                total_sum *= oriented.for_slots(load_masked(scales, mask))
            sums.append(total_sum)
        base = carry.peak - self.lift
        return SoftmaxPartial(tuple(sums), total, base, self.value_parts, self.rows, oriented)
