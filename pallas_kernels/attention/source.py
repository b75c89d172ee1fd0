"""The keys that a program reads, and how it goes from one tile of them to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mpjax.kernels.attention import tiles
from mpjax.kernels.kv_cache.cache import KVPages


class Source(NamedTuple):
    """Every `programs`-th tile of a sequence's pages, from the program's own number on."""

    pages: KVPages
    block_tables: Any  # or None, where the page is the sequence's number
    begin: jax.Array  # position of the first token of the first page
    end: jax.Array  # position behind the last token
    tile_keys: int
    number: jax.Array
    programs: Any  # int, or a number that the kernel finds
    split: jax.Array  # this program's number among those of all sources
    most: int | None = None  # tiles that a program may read, where the kernel finds how many
    limit: jax.Array | None = None  # the tile before which it ends, from the first visible one on

    def tiles_below(self, tile: jax.Array, first_tile: jax.Array) -> jax.Array:
        """How many of the program's tiles, from its first on, come before a tile."""
        return (jnp.maximum(tile - first_tile, 0) + self.programs - 1) // self.programs

    def tiles_between(self, begin: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The program's first tile, and how many it has, of those with positions in a range.

        Positions count from the source's begin, and may lie before it.
        """
        size = self.tile_keys
        begin_tile = jnp.maximum(begin, 0) // size
        end_tile = (jnp.maximum(end, 0) + size - 1) // size
        if self.limit is not None:
            end_tile = jnp.minimum(end_tile, begin_tile + self.limit)
        first_tile = begin_tile + self.number
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
        """The carry after the program's tiles from one number to before another.

        first_tile: which of the sequence's is number 0. see(number, carry, page): what to do with a
            tile, which is a piece of a page; without the page where it is not.
        """
        size, page_size = self.tile_keys, self.pages.page_size
        if self.block_tables is None or size > page_size:
            return jax.lax.fori_loop(first, last, see, carry)

        def some(number: jax.Array, carry: Any) -> Any:
            begin = first + number * tiles.LOOKED_UP
            own = first_tile + (begin + jnp.arange(tiles.LOOKED_UP)) * self.programs
            pages = tiles.look_up(own, size, page_size, self.block_tables, batch)
            return jax.lax.fori_loop(
                begin,
                jnp.minimum(begin + tiles.LOOKED_UP, last),
                lambda index, carry: see(index, carry, tiles.pick(pages, index - begin)),
                carry,
            )

        most = self.most
        if most is None:
            most = -(-self.block_tables.shape[1] * page_size // (size * self.programs))
        if most <= tiles.LOOKED_UP:
            return some(jnp.int32(0), carry)
        groups = (last - first + tiles.LOOKED_UP - 1) // tiles.LOOKED_UP
        return jax.lax.fori_loop(0, groups, some, carry)
