"""Tiles of keys and values: where they are in the pages, and how a kernel loads them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.bits import unpack_pair
from pallas_kernels.kv_cache.cache import Side

MINIMUM_SPAN = 16  # of a dimension that the tensor cores sum over


@dataclasses.dataclass(frozen=True)
class Span:
    """Neighbouring words of a head, as many as a tile may be wide: a power of two.

    The last of them may lie beyond the `width` of a head's words: what is loaded there is zero.
    """

    first: int
    size: int
    width: int

    @property
    def lanes(self) -> jax.Array:
        """The words' indices; inside a kernel, where arrays can't come from outside."""
        return self.first + jnp.arange(self.size)

    @property
    def mask(self) -> jax.Array | None:
        """Which lanes there are, or None if all are."""
        return None if self.first + self.size <= self.width else self.lanes < self.width


def spans(width: int) -> tuple[Span, ...]:
    """Spans that cover a width; padded at the end only where less than a half of one is left."""
    found = []
    first = 0
    while first < width:
        size = 1 << ((width - first).bit_length() - 1)
        if size < MINIMUM_SPAN or (size < 2 * MINIMUM_SPAN and size < width - first):
            size = max(2 * size, MINIMUM_SPAN)
        found.append(Span(first, size, width))
        first += size
    return tuple(found)


class Place(NamedTuple):
    """Where the slots of a tile are: a page, of all alike or of each, and positions in it."""

    page: jax.Array  # [] or [slots]
    position: jax.Array  # [slots]


def locate(
    tile: jax.Array, slots: int, page_size: int, block_tables: Any, batch: jax.Array
) -> Place:
    """The place of a tile of keys, which is a piece of a page or several pages.

    block_tables: a reference to them. Slots past the end of a sequence's are in its last page.
    """
    slot = jnp.arange(slots)
    if slots <= page_size:
        pieces = page_size // slots
        page = backend.load(block_tables.at[batch, tile // pieces])
        return Place(page, tile % pieces * slots + slot)
    entry = tile * (slots // page_size) + slot // page_size
    page = backend.load(block_tables.at[batch, jnp.minimum(entry, block_tables.shape[1] - 1)])
    return Place(page, slot % page_size)


def fetch(
    side: Side, head: jax.Array, place: Place, span: Span, axis: int, first: int = 0
) -> jax.Array:
    """Words of a head, with the slots along one axis, and the lanes of a span along the other.

    first: the word where lane 0 is.
    """
    page, position = place
    page = jnp.expand_dims(page, 1 - axis) if page.ndim else page
    lanes = jnp.expand_dims(span.lanes + first if first else span.lanes, axis)
    position = jnp.expand_dims(position, 1 - axis)
    mask = None if span.mask is None else jnp.expand_dims(span.mask, axis)
    return backend.load_masked(side.words.at[page, head, position, lanes], mask)


class Part(NamedTuple):
    """Channels that make one operand: those of a span of words, in neighbouring planes."""

    span: Span
    planes: range

    @property
    def size(self) -> int:
        """How many channels, with those that there aren't."""
        return len(self.planes) * self.span.size

    def channels(self) -> tuple[jax.Array, jax.Array | None]:
        """Their indices in a head, plane by plane, and which there are; inside a kernel."""
        span = self.span
        if len(self.planes) == 1:
            return self.planes[0] * span.width + span.lanes, span.mask
        number = jnp.arange(self.size)
        plane, word = jax.lax.div(number, span.size), span.first + jax.lax.rem(number, span.size)
        mask = None if span.mask is None else word < span.width
        return (self.planes[0] + plane) * span.width + word, mask


def parts(width: int, planes: int, *, joined: bool) -> list[Part]:
    """Operands for all channels of a head: each a plane of a span or, joined, all of its planes."""
    size = planes if joined else 1
    return [
        Part(span, range(first, first + size))
        for span in spans(width)
        for first in range(0, planes, size)
    ]


def operands(
    side: Side,
    head: jax.Array,
    place: Place,
    parts: Sequence[Part],
    dtype: jnp.dtype,
    *,
    axis: int,
    scaled: bool,
    group: jax.Array | int = 0,
    ptx: bool,
) -> Iterator[jax.Array]:
    """A tile's operands, one for each of the parts of the packed side; slots are along one axis.

    From words; or from a side in 16 bits, where the channels of different planes lie apart.
    scaled: as values, with the scales of tokens or of channels (over `group` of the page), rather
        than as exact codes.
    """
    scaling = side.codes.scaling if scaled else None
    if scaling == "token":
        page, position = place.page, jnp.expand_dims(place.position, 1 - axis)
        page = jnp.expand_dims(page, 1 - axis) if page.ndim else page
        pair = backend.load(side.parameters.at[page, head, position])

    def decode(words: jax.Array, span: Span, plane: int) -> jax.Array:
        if scaling == "token":
            parameters = pair
        elif scaling == "channel":
            lanes = span.lanes + plane * span.width
            parameters = backend.load_masked(
                side.parameters.at[place.page, head, group, lanes], span.mask
            )
            parameters = jnp.expand_dims(parameters, axis)
        else:
            return side.codes.operand(words, plane, dtype, ptx=ptx)
        step, zero = unpack_pair(parameters, dtype, dtype)
        return side.codes.scaled_operand(words, plane, step, zero, ptx=ptx)

    for span, members in itertools.groupby(parts, lambda part: part.span):
        if side.codes.is_quantized:
            words = fetch(side, head, place, span, axis)
            for part in members:
                yield backend.join([decode(words, span, plane) for plane in part.planes])
            continue
        for part in members:
            planes = [
                fetch(side, head, place, span, axis, plane * span.width) for plane in part.planes
            ]
            yield backend.join([decode(x, span, 0) for x in planes])


def fetch_parameters(
    side: Side, head: jax.Array, place: Place, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Steps and middles [slots], float32: a channel is (code − 2**(bits − 1)) · step + middle."""
    pair = backend.load(side.parameters.at[place.page, head, place.position])
    return _steps_and_middles(pair, side, dtype)


def fetch_channels(
    side: Side, head: jax.Array, page: jax.Array, group: jax.Array, part: Part, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Steps and middles [channels] of a part, for a group of tokens."""
    channels, mask = part.channels()
    pair = backend.load_masked(side.parameters.at[page, head, group, channels], mask)
    return _steps_and_middles(pair, side, dtype)


def _steps_and_middles(
    pair: jax.Array, side: Side, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    step, zero = unpack_pair(pair, dtype, dtype)
    step = step.astype(jnp.float32)
    return step, zero.astype(jnp.float32) + step * float(2 ** (side.codes.bits - 1))
