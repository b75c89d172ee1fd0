"""Tiles of keys and values: their positions in the pages, and how a kernel loads and decodes them.

A tile has two axes: slots, one for each token, and words or channels of one KV head. A word has one
code of each plane. A head is decoded in parts: the channels of a range of words, in one or all
planes, become one operand.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mpjax.kernels.bits import exponent_scaled, unpack_pair, widen_pair
from mpjax.kernels.kv_cache.cache import Side
from mpjax.kernels.launch import join, load, load_masked

PAGES_AT_ONCE = 32  # pages that are looked up at a time, one per lane of a warp
MINIMUM_WORDS = 16  # the least length of a dimension that the tensor cores sum over


@dataclasses.dataclass(frozen=True)
class Words:
    """A range of a head's words: `size` words, a power of two, `stride` apart.

    width: the number of words of a head. Words of the range beyond it load as zeros.
    """

    first: int
    size: int
    width: int
    stride: int = 1

    @property
    def lanes(self) -> jax.Array:
        """The words' indices, int32 [size], computed since kernels can't close over arrays."""
        return self.first + jnp.arange(self.size) * self.stride

    @property
    def mask(self) -> jax.Array | None:
        """Whether each of the indices is a word of the head, bool [size]; None if all are."""
        last = self.first + (self.size - 1) * self.stride
        return None if last < self.width else self.lanes < self.width


def cover(width: int) -> tuple[Words, ...]:
    """Consecutive ranges of words, of sizes that are powers of two, that cover `width` words.

    Only the last range may extend beyond, by fewer than MINIMUM_WORDS words.
    """
    ranges = []
    first = 0
    while first < width:
        size = 1 << ((width - first).bit_length() - 1)
        if size < MINIMUM_WORDS or (size < 2 * MINIMUM_WORDS and size < width - first):
            size = max(2 * size, MINIMUM_WORDS)
        ranges.append(Words(first, size, width))
        first += size
    return tuple(ranges)


class Place(NamedTuple):
    """The positions of a tile's slots in the pages."""

    page: jax.Array  # [], if the tile is a piece of a page, or [slots]
    position: jax.Array  # [slots], in the page
    group: jax.Array | int = 0  # the page's group of tokens, whose channel scales are the tile's
    head: jax.Array | int = 0  # the KV head


def locate(
    tile: jax.Array,
    slots: int,
    page_size: int,
    block_tables: Any,
    batch: jax.Array,
    last: jax.Array | None = None,
    page: jax.Array | None = None,
) -> Place:
    """The positions of a tile of a sequence, which is a piece of a page or several whole pages.

    tile: its index. slots: the number of a tile's tokens.
    block_tables: a reference [batch, pages per sequence], or None if page b is sequence b's.
    batch: the sequence's index.
    last: needed for tiles of several pages: the index of the table's last used entry. Later
        entries may be invalid, so their slots are placed in its page.
    page: needed for tiles that are pieces of a page: that page, from `look_up`.
    """
    slot = jnp.arange(slots)
    if block_tables is None:
        return Place(batch, tile * slots + slot)
    if slots <= page_size:
        assert page is not None
        return Place(page, tile % (page_size // slots) * slots + slot)
    entry = tile * (slots // page_size) + slot // page_size
    assert last is not None
    page = load(block_tables.at[batch, jnp.minimum(entry, last)])
    return Place(page, slot % page_size)


def look_up(
    tiles: jax.Array,
    slots: int,
    page_size: int,
    block_tables: Any,
    batch: jax.Array,
) -> jax.Array:
    """Looks up the pages of PAGES_AT_ONCE tiles, each a piece of a page; `pick` selects one.

    tiles: their indices, int32 [PAGES_AT_ONCE]. slots: the number of a tile's tokens.
    batch: the sequence's index.

    Looking them up one by one would be slow: in a loop, Triton loads a tile only half as far ahead
    if its address comes from another load. The load needs no mask for the sequence's length:
    entries past its end are loaded, but never picked.
    """
    entry = jnp.minimum(tiles // (page_size // slots), block_tables.shape[1] - 1)
    return load(block_tables.at[batch, entry])


def pick(pages: jax.Array, number: jax.Array) -> jax.Array:
    """The element `number` of the pages [PAGES_AT_ONCE] that `look_up` returned, a scalar."""
    return jnp.where(jnp.arange(PAGES_AT_ONCE) == number, pages, 0).max()


def load_words(
    side: Side, place: Place, lanes: jax.Array, mask: jax.Array | None, axis: int
) -> jax.Array:
    """Loads a tile of words, with slots along `axis` and words along the other axis.

    lanes, mask: the words' indices in the head, and whether each exists, or None if all do.
    """
    page, position, _, head = place
    page = jnp.expand_dims(page, 1 - axis) if page.ndim else page
    lanes = jnp.expand_dims(lanes, axis)
    position = jnp.expand_dims(position, 1 - axis)
    mask = None if mask is None else jnp.expand_dims(mask, axis)
    return load_masked(side.words.at[page, head, position, lanes], mask)


class Part(NamedTuple):
    """The channels of a head that are decoded to one operand: a range of words in adjacent planes.

    Plane p of word w is channel p · (words of the head) + w.
    """

    words: Words
    planes: range

    @property
    def size(self) -> int:
        """The number of channels, including padding of the words."""
        return len(self.planes) * self.words.size

    def channels(self) -> tuple[jax.Array, jax.Array | None]:
        """The channels' indices in a head, plane by plane, and which exist; inside a kernel.

        Returns int32 [size], and bool [size] or None if all exist.
        """
        words = self.words
        if len(self.planes) == 1:
            return self.planes[0] * words.width + words.lanes, words.mask
        number = jnp.arange(self.size)
        plane = jax.lax.div(number, words.size)
        word = words.first + jax.lax.rem(number, words.size)
        mask = None if words.mask is None else word < words.width
        return (self.planes[0] + plane) * words.width + word, mask


def parts(side: Side, *, joined: bool) -> list[Part]:
    """Parts that cover a head's channels; parts with the same words are consecutive.

    joined: whether a part has all planes of its words, instead of one plane.
    """
    planes = side.codes.planes
    size = planes if joined else 1
    return [
        Part(words, range(first, first + size))
        for words in cover(side.words.shape[3])
        for first in range(0, planes, size)
    ]


def operands(
    side: Side,
    place: Place,
    parts: Sequence[Part],
    dtype: jnp.dtype,
    *,
    axis: int,
    scaled: bool,
    copies: int = 1,
) -> Iterator[list[jax.Array]]:
    """Loads a tile and decodes it to operands of the tensor cores, part by part.

    parts: from the function `parts`.
    dtype: of the operands, 16 bits.
    axis: the axis of slots in the operands; the other axis has channels.
    scaled: whether scales and zeros of tokens or of channels are applied, and the result rounded
        once. Otherwise operands are codes minus `KVCodes.offset`, exact.
    copies: the number of equal operands that are decoded for each part, one for each product that
        uses it, since Triton moves an operand of two products through shared memory
        (`bits.decode_in_place`).

    Yields a list of `copies` operands for each part, scaled by 2**exponent (`exponents`).
    """
    scaling = side.codes.scaling if scaled else None
    if scaling == "token":
        page, position = place.page, jnp.expand_dims(place.position, 1 - axis)
        page = jnp.expand_dims(page, 1 - axis) if page.ndim else page
        token_pair = _unpacked(side, load(side.parameters.at[page, place.head, position]))

    def decode(words: jax.Array, part: Part, copy: int = 0) -> jax.Array:
        [plane] = part.planes
        if scaling == "token":
            return side.codes.scaled_operand(words, plane, *token_pair)
        if scaling == "channel":
            pair = channel_parameters(side, place, part)
            step, zero = (jnp.expand_dims(x, axis) for x in pair)
            return side.codes.scaled_operand(words, plane, step, zero)
        return side.codes.operand(words, plane, dtype, copy=copy)

    if side.codes.planes == 1:
        # Each word is a channel. Parts may still have planes: a 16-bit residual is processed in the
        # parts of the packed values, whose sums it continues.
        for part in parts:
            tile = load_words(side, place, *part.channels(), axis)
            yield [side.codes.operand(tile, 0, dtype)] * copies
        return
    for words, members in itertools.groupby(parts, lambda part: part.words):
        tile = load_words(side, place, words.lanes, words.mask, axis)
        for part in members:
            if len(part.planes) == 1:
                yield [decode(tile, part, copy) for copy in range(copies)]
                continue
            planes = [decode(tile, Part(words, range(plane, plane + 1))) for plane in part.planes]
            yield [join(planes)]


def exponents(side: Side, parts: Sequence[Part], dtype: jnp.dtype, *, scaled: bool) -> list[int]:
    """For each part, the exponent of the power of two by which `operands` scales it."""
    if scaled and side.codes.scaling in ("token", "channel"):
        return [exponent_scaled(dtype)] * len(parts)
    return [side.codes.exponent(part.planes[0], dtype) for part in parts]


def _unpacked(side: Side, pair: jax.Array) -> tuple[jax.Array, jax.Array]:
    return unpack_pair(pair, side.parameter_dtype, side.parameter_dtype)


def channel_parameters(side: Side, place: Place, part: Part) -> tuple[jax.Array, jax.Array]:
    """Loads the steps and zeros [channels] of a part's channels, in 16 bits."""
    channels, mask = part.channels()
    pair = load_masked(side.parameters.at[place.page, place.head, place.group, channels], mask)
    return _unpacked(side, pair)


def token_parameters(side: Side, place: Place, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Loads the steps and zeros [slots] of a tile's tokens, float32, for unscaled operands.

    A channel is step · operand / 2**exponent + zero; the zero includes `KVCodes.offset`.
    """
    pair = load(side.parameters.at[place.page, place.head, place.position])
    step, zero = widen_pair(pair, side.parameter_dtype)
    offset = side.codes.offset(dtype)
    return step, zero + step * offset if offset else zero
