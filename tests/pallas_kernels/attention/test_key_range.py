from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import KVFormat
from mpjax.kernels.attention import tiles
from mpjax.kernels.attention.key_range import KeyRange
from mpjax.kernels.kv_cache.cache import KVPages
from mpjax.kernels.launch import Settings, launch

PAGE_SIZE, PROGRAMS = 64, 3


def visited(tile_keys: int, entries: int, first_tile: int, last: int, rng: np.random.Generator):
    """The tiles that the second program visits from its tile 1 to before `last`, and the table.

    A row for each of its tiles: how many came before, and the tile's page where it got one.
    """
    tables = rng.permutation(2 * entries).astype(np.int32).reshape(2, entries)
    pages = jnp.zeros((2 * entries, 1, PAGE_SIZE, 16), jnp.bfloat16)

    def kernel(references: Any, out_ref: Any) -> None:
        tables_ref, pages_ref = references
        key_range = KeyRange(
            KVPages(pages_ref, pages_ref, None, None, KVFormat()),
            tables_ref,
            jnp.int32(0),
            jnp.int32(entries * PAGE_SIZE),
            tile_keys,
            jnp.int32(1),
            PROGRAMS,
            jnp.int32(1),
        )
        out_ref[...] = jnp.full(out_ref.shape, -1)

        def see(number: jax.Array, count: jax.Array, page: jax.Array | None = None) -> jax.Array:
            out_ref[number, 0] = count
            out_ref[number, 1] = jnp.int32(-2) if page is None else page
            return count + 1

        bounds = (jnp.int32(1), jnp.int32(last), jnp.int32(first_tile), jnp.int32(1))
        key_range.visit(*bounds, see, jnp.int32(0))

    out = launch(
        kernel,
        (jnp.asarray(tables), pages),
        out_shape=jax.ShapeDtypeStruct((last + 2, 2), jnp.int32),
        grid=(1,),
        settings=Settings("key_range"),
        interpret=True,
    )
    return np.asarray(out), tables[1]


@pytest.mark.parametrize("tile_keys", [32, 64])
@pytest.mark.parametrize(("entries", "last"), [(40, 12), (250, 80), (3, 1)])
def test_tiles_that_are_pieces_of_pages_come_in_order_with_their_pages(
    tile_keys, entries, last, rng
):
    """Fewer than are looked up at once, more of them, and none."""
    assert tiles.PAGES_AT_ONCE == 32
    found, table = visited(tile_keys, entries, 4, last, rng)
    np.testing.assert_array_equal(found[1:last, 0], np.arange(last - 1))
    own = 4 + np.arange(1, last) * PROGRAMS
    expected = table[np.minimum(own // (PAGE_SIZE // tile_keys), entries - 1)]
    np.testing.assert_array_equal(found[1:last, 1], expected)
    assert (found[0] == -1).all()
    assert (found[last:] == -1).all()


def test_tiles_of_several_pages_come_without(rng):
    found, _ = visited(128, 40, 4, 6, rng)
    np.testing.assert_array_equal(found[1:6, 0], range(5))
    assert (found[1:6, 1] == -2).all()


@pytest.mark.parametrize("first_tile", [1, 7])
def test_tiles_below_another(first_tile):
    key_range = KeyRange(*[None] * 6, PROGRAMS, None)  # type: ignore[arg-type]
    own = first_tile + PROGRAMS * np.arange(20)
    for tile in range(30):
        below = key_range.tiles_below(jnp.int32(tile), jnp.int32(first_tile))
        assert int(below) == (own < tile).sum()


@pytest.mark.parametrize(
    ("begin", "end", "limit", "expected"),
    [
        (0, 0, None, []),
        (0, 1000, None, [2, 5, 8, 11, 14]),
        (-70, 64 * 8, None, [2, 5]),
        (64 * 3, 64 * 8 + 1, None, [5, 8]),
        (64 * 3 + 63, 1000, 6, [5, 8]),
        (0, 64 * 6, 50, [2, 5]),
    ],
)
def test_tiles_between_positions(begin, end, limit, expected):
    limit = None if limit is None else jnp.int32(limit)
    key_range = KeyRange(*[None] * 4, 64, jnp.int32(2), PROGRAMS, None, None, limit)  # type: ignore[arg-type]
    first, count = key_range.tiles_between(jnp.int32(begin), jnp.int32(end))
    assert [int(first) + PROGRAMS * number for number in range(int(count))] == expected
