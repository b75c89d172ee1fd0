"""The keys that a program processes, tile by tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mpjax.kernels.attention import tiles
from mpjax.kernels.kv_cache.cache import KVPages


class KeyRange(NamedTuple):
    """A program's share of a sequence's keys: every `programs`-th tile, beginning with `number`.

    Tiles are counted from the first page; with a `limit` from the first one that a row of the
    program attends to.
    """

    pages: KVPages  # references
    block_tables: Any  # a reference [batch, pages per sequence]; None if page b is sequence b's
    begin: jax.Array  # position of the first token of the first page
    end: jax.Array  # position after the last token
    tile_keys: int
    number: jax.Array  # the program's first tile
    programs: Any  # how many programs share the tiles: an int, or a scalar of the kernel
    split: jax.Array  # the program's index in the sequence; 0 adds the sinks
    most: int | None = None  # the most tiles of a program, if `programs` is not static
    limit: jax.Array | None = None  # the tile after the program's last, if limited

    def tiles_below(self, tile: jax.Array, first_tile: jax.Array) -> jax.Array:
        """The number of the program's tiles from `first_tile`, its first, to before `tile`.

        Here tiles are counted from the first page.
        """
        return (jnp.maximum(tile - first_tile, 0) + self.programs - 1) // self.programs

    def tiles_between(self, begin: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The program's first tile in a range of positions, and the number of its tiles there.

        begin, end: positions counted from the first page's first token; negative ones count as 0.
        Tiles, too, are counted from there.
        """
        size = self.tile_keys
        begin_tile = jnp.maximum(begin, 0) // size
        end_tile = (jnp.maximum(end, 0) + size - 1) // size
        if self.limit is not None:
            end_tile = jnp.minimum(end_tile, begin_tile + self.limit)
        # Dealt from the first page's first tile on, so that a row's tiles are added in the same
        # order, however many tiles are before the window of the program's first row.
        ahead = self.number
        if self.limit is None:
            ahead = jax.lax.rem(self.number - begin_tile, self.programs)
            ahead = jnp.where(ahead < 0, ahead + self.programs, ahead)
        first_tile = begin_tile + ahead
        return first_tile, self.tiles_below(end_tile, first_tile)

    def visit(
        self,
        first: jax.Array,
        last: jax.Array,
        first_tile: jax.Array,
        batch: jax.Array,
        see: Callable[..., Any],
        carry: Any,
    ) -> Any:
        """Calls `see` for the program's tiles from `first` to before `last`, and carries a value.

        first_tile: the program's tile 0, counted from the first page.
        batch: the sequence's index.
        see: called as see(number, carry, page) if a tile is a piece of the page, else as
            see(number, carry); it returns the next carry.

        Returns the last carry.
        """
        size, page_size = self.tile_keys, self.pages.page_size
        if self.block_tables is None or size > page_size:
            return jax.lax.fori_loop(first, last, see, carry)

        # The block table is loaded for several tiles at a time (`tiles.look_up`).
        def see_some(number: jax.Array, carry: Any) -> Any:
            begin = first + number * tiles.PAGES_AT_ONCE
            own = first_tile + (begin + jnp.arange(tiles.PAGES_AT_ONCE)) * self.programs
            pages = tiles.look_up(own, size, page_size, self.block_tables, batch)
            return jax.lax.fori_loop(
                begin,
                jnp.minimum(begin + tiles.PAGES_AT_ONCE, last),
                lambda index, carry: see(index, carry, tiles.pick(pages, index - begin)),
                carry,
            )

        most = self.most
        if most is None:
            most = -(-self.block_tables.shape[1] * page_size // (size * self.programs))
        if most <= tiles.PAGES_AT_ONCE:
            return see_some(jnp.int32(0), carry)
        groups = (last - first + tiles.PAGES_AT_ONCE - 1) // tiles.PAGES_AT_ONCE
        return jax.lax.fori_loop(0, groups, see_some, carry)
