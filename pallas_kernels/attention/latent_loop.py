"""The main loop of attention over latents: one load of a tile for both its keys and its values.

The rows of a tile are the query heads of a token. They are on the narrow side of the tensor-core
instruction, where eight rows suffice, and latents on the other side: a tile of latents [slots,
channels] times queries gives scores, and the same tile transposed times weights gives sums. In 16
bits the tensor cores read both operands from one tile in shared memory. Codes are loaded once for
each product, the second time from the L2 cache: transposing a tile of codes after its load would
move it through shared memory twice more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mpjax.kernels.attention import queries, tiles
from mpjax.kernels.attention.main_loop import LEAST_EXPONENT, LoadOperands, MainLoop, Scores
from mpjax.kernels.attention.plans import MOST_ROWS
from mpjax.kernels.attention.tiles import Part, Place
from mpjax.kernels.kv_cache.cache import Side


class LatentQueries(NamedTuple):
    """The queries of attention over latents, [..., query heads, channels] each.

    absorbed: are multiplied by latents. rotated: are multiplied by the rotary part.
    """

    absorbed: jax.Array
    rotated: jax.Array


class LatentLoop(MainLoop):
    """Attention of a tile of rows to the latents of a KeyRange and their rotary part."""

    name = "latent_attention"
    narrow_rows = few_rows = MOST_ROWS

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        operands = arguments[0]
        _, rotary = self.key_range.pages.sides
        self.rotary, self.rotary_parts = rotary, tiles.parts(rotary, joined=False)
        exponents = tiles.exponents(rotary, self.rotary_parts, self.dtype, scaled=False)
        least = max(min(exponents), LEAST_EXPONENT)
        shifts = [least - exponent for exponent in exponents]
        loaded = [self.rows.load(operands.rotated, part) for part in self.rotary_parts]
        self.rotated = queries.prepare(loaded, shifts, self.dtype)
        self.rotary_scale = self.plain_scale * 2.0**-least

    @property
    def sides(self) -> tuple[Side, Side]:
        """The latents, as keys and as values."""
        latents, _ = self.key_range.pages.sides
        return latents, latents

    def _added(self, scores: jax.Array, product: jax.Array) -> jax.Array:
        """Adds the product of another part to scores, after the product is complete."""
        return self.target.multiply_add(jnp.float32(1), product, scores)

    def _loader(self, place: Place) -> LoadOperands:
        """A function that in 16 bits loads a tile only once for both products."""
        if self.keys.codes.is_quantized:
            return super()._loader(place)
        loaded: dict[Any, jax.Array] = {}

        def operands(
            side: Side,
            *,
            parts: Sequence[Part],
            dtype: jnp.dtype,
            axis: int,
            scaled: bool,
            copies: int = 1,
        ) -> Iterator[list[jax.Array]]:
            assert not scaled, "scales of tokens are applied to scores and weights"
            for part in parts:
                key = side.words is self.rotary.words, part.words
                if key not in loaded:
                    lanes, mask = part.words.lanes, part.words.mask
                    loaded[key] = tiles.load_words(side, place, lanes, mask, 0)
                words = loaded[key] if axis == 0 else loaded[key].T
                yield [side.codes.operand(words, part.planes[0], dtype)] * copies

        return operands

    def _scores(self, place: Place, load_operands: LoadOperands) -> Scores:
        """The scores of a tile of latents and their rotary part, to base 2, not masked."""
        found, oriented, target = super()._scores(place, load_operands), self.oriented, self.target
        scores = self._zeros(self.key_range.tile_keys)
        loaded = load_operands(
            self.rotary, parts=self.rotary_parts, dtype=self.dtype, axis=0, scaled=False
        )
        for q, [operand] in zip(self.rotated.parts, loaded, strict=True):
            scores = self._added(scores, oriented.times_queries(operand, q))
        if self.rotary.codes.scaling == "token":
            step, zero = tiles.token_parameters(self.rotary, place, self.dtype)
            zeros = oriented.for_slots(zero * self.plain_scale)
            zeros *= oriented.for_rows(self.rotated.sum)
            steps = oriented.for_slots(step * self.rotary_scale)
            scores = target.multiply_add(scores, steps, zeros)
        else:
            scores *= self.rotary_scale
        factor = oriented.for_rows(jnp.asarray(found.factor, jnp.float32))
        return Scores(target.multiply_add(found.tile, factor, scores), offset=found.offset)
