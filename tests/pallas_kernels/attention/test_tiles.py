from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpjax.kernels.attention import tiles
from mpjax.kernels.launch import Settings, first_program_id, launch


@given(st.integers(1, 600))
def test_spans_cover_a_width_once(width):
    spans = tiles.cover(width)
    assert spans[0].first == 0
    for span, following in itertools.pairwise(spans):
        assert following.first == span.first + span.size
        assert span.mask is None
    for span in spans:
        assert span.size >= tiles.MINIMUM_WORDS
        assert span.size & (span.size - 1) == 0
    last = spans[-1]
    assert last.first < width <= last.first + last.size
    assert (last.mask is None) == (last.first + last.size == width)
    assert last.size - (width - last.first) < tiles.MINIMUM_WORDS


@pytest.mark.parametrize(
    ("width", "sizes"),
    [(256, [256]), (128, [128]), (96, [64, 32]), (48, [32, 16]), (24, [32]), (16, [16])],
)
def test_spans_of_heads(width, sizes):
    """All but 24 words, of 96 channels in four bits, come without padding."""
    assert [span.size for span in tiles.cover(width)] == sizes


@pytest.mark.parametrize(("first", "there"), [(8, 4), (9, 4), (17, 4), (18, 3), (23, 1)])
def test_a_span_with_gaps_is_masked_where_it_leaves_the_head(first, there):
    span = tiles.Words(first, 4, 24, stride=2)
    np.testing.assert_array_equal(span.lanes, range(first, first + 8, 2))
    assert (span.mask is None) == (there == 4)
    if span.mask is not None:
        np.testing.assert_array_equal(span.mask, [True] * there + [False] * (4 - there))


@pytest.mark.parametrize(("slots", "page_size"), [(64, 64), (64, 128), (64, 16)])
def test_a_tile_is_a_piece_of_a_page_or_several_pages(slots, page_size, rng):
    tables = rng.permutation(14).astype(np.int32).reshape(2, 7)

    def kernel(tables_ref: Any, pages_ref: Any, positions_ref: Any) -> None:
        tile = first_program_id()
        batch, last, page = jnp.int32(1), jnp.int32(4), None
        if slots <= page_size:
            every = jnp.full(tiles.PAGES_AT_ONCE, tile)
            page = tiles.pick(tiles.look_up(every, slots, page_size, tables_ref, batch), 5)
        place = tiles.locate(tile, slots, page_size, tables_ref, batch, last, page)
        pages_ref[tile] = jnp.broadcast_to(place.page, (slots,))
        positions_ref[tile] = place.position

    entries = 5 if slots <= page_size else 7  # only tiles of several pages end behind the last one
    count = -(-entries * page_size // slots)
    pages, positions = launch(
        kernel,
        jnp.asarray(tables),
        out_shape=[jax.ShapeDtypeStruct((count, slots), jnp.int32)] * 2,
        grid=(count,),
        settings=Settings("places"),
        interpret=True,
    )
    entry, position = np.divmod(np.arange(count * slots), page_size)
    np.testing.assert_array_equal(np.ravel(pages), tables[1, np.minimum(entry, 4)])
    np.testing.assert_array_equal(np.ravel(positions), position)


@pytest.mark.parametrize("slots", [64, 128])
def test_pages_that_are_looked_up_at_once_are_those_of_their_tiles(slots, rng):
    """Every third tile from the second on; past the end of the table it is its last page."""
    page_size, entries = 128, 20
    tables = rng.permutation(64).astype(np.int32)[: 2 * entries].reshape(2, entries)

    def kernel(tables_ref: Any, out_ref: Any) -> None:
        every = 1 + 3 * jnp.arange(tiles.PAGES_AT_ONCE)
        pages = tiles.look_up(every, slots, page_size, tables_ref, jnp.int32(1))
        for number in range(tiles.PAGES_AT_ONCE):
            out_ref[number] = tiles.pick(pages, jnp.int32(number))

    found = launch(
        kernel,
        jnp.asarray(tables),
        out_shape=jax.ShapeDtypeStruct((tiles.PAGES_AT_ONCE,), jnp.int32),
        grid=(1,),
        settings=Settings("look_up"),
        interpret=True,
    )
    entry = (1 + 3 * np.arange(tiles.PAGES_AT_ONCE)) // (page_size // slots)
    np.testing.assert_array_equal(found, tables[1, np.minimum(entry, entries - 1)])


@pytest.mark.parametrize("slots", [64, 128])
def test_nothing_behind_a_table_is_looked_up(slots, monkeypatch):
    """Interpreted, a kernel moves the index back into the table; a GPU reads what is there."""

    class Indices:
        shape = (2, 20)
        at = property(lambda self: self)

        def __getitem__(self, index):
            return index

    monkeypatch.setattr(tiles, "load", lambda index: index[1])
    every = jnp.arange(tiles.PAGES_AT_ONCE) * 3
    entries = tiles.look_up(every, slots, 128, Indices(), jnp.int32(1))
    assert entries.max() == 19
