"""Tiles of keys and values: where they are in the pages, and how a kernel loads them."""

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

LOOKED_UP = 32  # pages at a time: a warp has as many lanes
MINIMUM_WORDS = 16  # of a dimension that the tensor cores sum over


@dataclasses.dataclass(frozen=True)
class Words:
    """Words of a head, `stride` apart, as many as a tile may be wide: a power of two.

    The last of them may lie beyond the `width` of a head's words: what is loaded there is zero.
    """

    first: int
    size: int
    width: int
    stride: int = 1

    @property
    def lanes(self) -> jax.Array:
        """The words' indices; inside a kernel, where arrays can't come from outside."""
        return self.first + jnp.arange(self.size) * self.stride

    @property
    def mask(self) -> jax.Array | None:
        """Which lanes there are, or None if all are."""
        last = self.first + (self.size - 1) * self.stride
        return None if last < self.width else self.lanes < self.width


def cover(width: int) -> tuple[Words, ...]:
    """Words that are a width together; padded at the end only where less than a half is left."""
    found = []
    first = 0
    while first < width:
        size = 1 << ((width - first).bit_length() - 1)
        if size < MINIMUM_WORDS or (size < 2 * MINIMUM_WORDS and size < width - first):
            size = max(2 * size, MINIMUM_WORDS)
        found.append(Words(first, size, width))
        first += size
    return tuple(found)


class Place(NamedTuple):
    """Where the slots of a tile are: a page, of all alike or of each, and positions in it.

    group: of the page's tokens, whose scales of channels are the tile's.
    head: KV head.
    """

    page: jax.Array  # [] or [slots]
    position: jax.Array  # [slots]
    group: jax.Array | int = 0
    head: jax.Array | int = 0


def locate(
    tile: jax.Array,
    slots: int,
    page_size: int,
    block_tables: Any,
    batch: jax.Array,
    last: jax.Array | None = None,
    page: jax.Array | None = None,
) -> Place:
    """The pages and positions of a tile of keys, which is a piece of a page or several pages.

    block_tables: a reference to them, or None, where each sequence has one page.
    last: the entry of the sequence's last page in use, in which are slots past its end, too: what
        the table says behind it may be no page.
    page: that of a tile which is a piece of one (`look_up`).
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
    """The pages of LOOKED_UP tiles that are pieces of pages, for `pick` to choose from.

    A load of a tile that waited for that of its page would begin only half as far ahead. Nor does
    this one wait for the sequence's length: what the table says past its end is not chosen.
    """
    entry = jnp.minimum(tiles // (page_size // slots), block_tables.shape[1] - 1)
    return load(block_tables.at[batch, entry])


def pick(pages: jax.Array, number: jax.Array) -> jax.Array:
    """One of the pages that were looked up."""
    return jnp.where(jnp.arange(LOOKED_UP) == number, pages, 0).max()


def fetch(
    side: Side, place: Place, lanes: jax.Array, mask: jax.Array | None, axis: int
) -> jax.Array:
    """Words of a head, with the slots along one axis, and lanes, if they are, along the other."""
    page, position, _, head = place
    page = jnp.expand_dims(page, 1 - axis) if page.ndim else page
    lanes = jnp.expand_dims(lanes, axis)
    position = jnp.expand_dims(position, 1 - axis)
    mask = None if mask is None else jnp.expand_dims(mask, axis)
    return load_masked(side.words.at[page, head, position, lanes], mask)


class Part(NamedTuple):
    """Channels that make one operand: some words, in neighbouring planes."""

    words: Words
    planes: range

    @property
    def size(self) -> int:
        """How many channels, with those that there aren't."""
        return len(self.planes) * self.words.size

    def channels(self) -> tuple[jax.Array, jax.Array | None]:
        """Their indices in a head, plane by plane, and which there are; inside a kernel."""
        words = self.words
        if len(self.planes) == 1:
            return self.planes[0] * words.width + words.lanes, words.mask
        number = jnp.arange(self.size)
        plane = jax.lax.div(number, words.size)
        word = words.first + jax.lax.rem(number, words.size)
        mask = None if words.mask is None else word < words.width
        return (self.planes[0] + plane) * words.width + word, mask


def parts(side: Side, *, joined: bool) -> list[Part]:
    """Operands for all channels of a head: each a plane of some words or, joined, all planes."""
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
    """A tile's operands, some for each part, times 2**`exponents`; slots are along one axis.

    scaled: with the scales and zeros of tokens or of channels, rounded once; without, exact.
    copies: how many alike, one for each product that they are in.
    """
    scaling = side.codes.scaling if scaled else None
    if scaling == "token":
        page, position = place.page, jnp.expand_dims(place.position, 1 - axis)
        page = jnp.expand_dims(page, 1 - axis) if page.ndim else page
        of_tokens = _unpacked(side, load(side.parameters.at[page, place.head, position]))

    def decode(words: jax.Array, part: Part, copy: int = 0) -> jax.Array:
        [plane] = part.planes
        if scaling == "token":
            return side.codes.scaled_operand(words, plane, *of_tokens)
        if scaling == "channel":
            found = channel_parameters(side, place, part)
            step, zero = (jnp.expand_dims(x, axis) for x in found)
            return side.codes.scaled_operand(words, plane, step, zero)
        return side.codes.operand(words, plane, dtype, copy=copy)

    if side.codes.planes == 1:  # words are channels, wanted in the parts of others, too
        for part in parts:
            fetched = fetch(side, place, *part.channels(), axis)
            yield [side.codes.operand(fetched, 0, dtype)] * copies
        return
    for words, members in itertools.groupby(parts, lambda part: part.words):
        fetched = fetch(side, place, words.lanes, words.mask, axis)
        for part in members:
            if len(part.planes) == 1:
                yield [decode(fetched, part, copy) for copy in range(copies)]
                continue
            planes = [
                decode(fetched, Part(words, range(plane, plane + 1))) for plane in part.planes
            ]
            yield [join(planes)]


def exponents(side: Side, parts: Sequence[Part], dtype: jnp.dtype, *, scaled: bool) -> list[int]:
    """Of two: what one is worth in the operand of each part."""
    if scaled and side.codes.scaling in ("token", "channel"):
        return [exponent_scaled(dtype)] * len(parts)
    return [side.codes.exponent(part.planes[0], dtype) for part in parts]


def _unpacked(side: Side, pair: jax.Array) -> tuple[jax.Array, jax.Array]:
    return unpack_pair(pair, side.parameter_dtype, side.parameter_dtype)


def channel_parameters(side: Side, place: Place, part: Part) -> tuple[jax.Array, jax.Array]:
    """Steps and zeros [channels] of a part, in 16 bits."""
    channels, mask = part.channels()
    pair = load_masked(side.parameters.at[place.page, place.head, place.group, channels], mask)
    return _unpacked(side, pair)


def fetch_parameters(side: Side, place: Place, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Steps and zeros [slots], float32: a channel is step · operand / 2**exponent + zero."""
    pair = load(side.parameters.at[place.page, place.head, place.position])
    step, zero = widen_pair(pair, side.parameter_dtype)
    offset = side.codes.offset(dtype)
    return step, zero + step * offset if offset else zero
