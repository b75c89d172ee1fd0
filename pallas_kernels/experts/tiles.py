"""Tiles of rows for a grouped product: the expert and the pairs of each tile.

A *pair* is a token and one of its experts; pair t · k + j is token t with its j-th expert. A tile
has up to tile_m pairs of one expert. The counts of pairs are known only on the device, so there are
as many tiles as any counts could need, and the last tiles may be unused.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["expert", "pairs"],
    meta_fields=["count", "is_partial"],
)
@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tiles of a grouped product: arrays outside of a kernel, references inside.

    expert: int32 [tiles], each tile's expert; −1 for an unused tile.
    pairs: int32 [tiles, tile_m], the indices of each tile's pairs; `count` stands for no pair. The
        pairs of an unused tile are undefined. None if tile i has only pair i.
    count: the number of all pairs (static).
    is_partial: whether some pairs may be in no tile: with LocalExperts (static).
    """

    expert: jax.Array
    pairs: jax.Array | None
    count: int
    is_partial: bool = False


def most_tiles(pairs: int, experts: int, tile_m: int) -> int:
    """The most tiles that this number of pairs takes, whatever their experts are."""
    hit = min(pairs, experts)
    return hit + (pairs - hit) // tile_m


def one_for_each_pair(experts: jax.Array) -> Tiles:
    """A tile for each pair, without sorting: for so few pairs that they hardly share experts.

    experts: int32 [tokens, k].
    """
    return Tiles(experts.reshape(-1), None, experts.size)


def sorted_by_expert(experts: jax.Array, count: int, tile_m: int) -> Tiles:
    """Tiles with the pairs sorted by expert.

    experts: int32 [tokens, k], from 0 to `count` − 1.
    """
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = (flat[:, None] == jnp.arange(count)[None]).sum(0, dtype=jnp.int32)
    ends = jnp.cumsum(sizes)  # of each expert's pairs in the sorted order
    tiles = -(-sizes // tile_m)
    last_tiles = jnp.cumsum(tiles)
    tile = jnp.arange(most_tiles(flat.size, count, tile_m))
    expert = (last_tiles[None] <= tile[:, None]).sum(1, dtype=jnp.int32)
    known = jnp.minimum(expert, count - 1)
    behind = (last_tiles - tiles)[known]  # the number of tiles of all experts before
    first = (ends - sizes)[known] + (tile - behind) * tile_m
    place = first[:, None] + jnp.arange(tile_m)[None]
    pairs = jnp.take(order, place, mode="clip")
    pairs = jnp.where(place < ends[known][:, None], pairs, flat.size)
    return Tiles(jnp.where(expert < count, expert, -1), pairs.astype(jnp.int32), flat.size)


def places(tiles: Tiles) -> jax.Array:
    """The index of each pair, int32 [pairs], among the rows of all tiles.

    The index of a pair in no tile is beyond all rows.
    """
    if tiles.pairs is None:
        return jnp.arange(tiles.count, dtype=jnp.int32)
    is_used = (tiles.expert >= 0)[:, None] & (tiles.pairs < tiles.count)
    row = jnp.arange(tiles.pairs.size, dtype=jnp.int32)
    # Rows without a pair get distinct indices beyond the last pair, which are dropped.
    pair = jnp.where(is_used.reshape(-1), tiles.pairs.reshape(-1), tiles.count + row)
    found = jnp.full(tiles.count, tiles.pairs.size if tiles.is_partial else 0, jnp.int32)
    return found.at[pair].set(row, mode="drop", unique_indices=True)
