"""Tiles of a grouped product by a counting kernel: without a sort, for up to some 10,000 pairs.

The program of an expert counts the pairs of all experts, which determines the index of its first
tile, and then stores its own pairs in order.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels.experts.tiles import Tiles, most_tiles
from mpjax.kernels.launch import Settings, first_program_id, launch, load_masked, store

# A loop step takes a third of a microsecond, however little it does, so steps are large.
COMPARED = 16384  # pairs · experts that a program compares at a time
PLACED = 1024  # pairs that a program compares with its own expert at a time


class _Sizes(NamedTuple):
    """Sizes of a launch; steps count `chunk` pairs, and store `placed` pairs."""

    pairs: int
    experts: int
    tile_m: int
    tiles: int
    chunk: int
    placed: int


@functools.partial(jax.jit, static_argnames=("count", "tile_m", "interpret"))
def counted(experts: jax.Array, count: int, tile_m: int, *, interpret: bool = False) -> Tiles:
    """The tiles of `tiles.sorted_by_expert`, for experts int32 [tokens, k] below `count`."""
    flat = experts.reshape(-1)
    tiles = most_tiles(flat.size, count, tile_m)
    most = pl.next_power_of_2(flat.size)
    chunk = min(max(16, COMPARED // pl.next_power_of_2(count)), most)
    sizes = _Sizes(flat.size, count, tile_m, tiles, chunk, min(PLACED, most))
    expert, pairs = launch(
        functools.partial(_kernel, sizes=sizes),
        flat,
        out_shape=(
            jax.ShapeDtypeStruct((tiles,), jnp.int32),
            jax.ShapeDtypeStruct((tiles, tile_m), jnp.int32),
        ),
        grid=(count,),
        settings=Settings("experts_tiles", warps=4),
        interpret=interpret,
    )
    return Tiles(expert, pairs, flat.size)


def _kernel(flat_ref: Any, expert_ref: Any, pairs_ref: Any, *, sizes: _Sizes) -> None:
    ours, tile_m = first_program_id(), sizes.tile_m
    number = jnp.arange(pl.next_power_of_2(sizes.experts))

    def load_chunk(index: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        pair = index * size + jnp.arange(size)
        inside = pair < sizes.pairs
        return pair, jnp.where(inside, load_masked(flat_ref.at[pair], inside), -1)

    def count(index: jax.Array, counts: jax.Array) -> jax.Array:
        _, expert = load_chunk(index, sizes.chunk)
        found = expert[:, None] == number[None, :]
        return counts + found.astype(jnp.int32).sum(0)

    chunks = pl.cdiv(sizes.pairs, sizes.chunk)
    counts = jax.lax.fori_loop(0, chunks, count, jnp.zeros(number.shape, jnp.int32))
    tiles = jax.lax.div(counts + (tile_m - 1), tile_m)
    first = jnp.where(number < ours, tiles, 0).sum()
    own_pairs, own_tiles = (jnp.where(number == ours, x, 0).sum() for x in (counts, tiles))

    # In interpret mode, a masked-out lane writes the old value back. Index `sizes.tiles`, which no
    # other lane uses, keeps it from overwriting a real entry.
    def place(index: jax.Array, is_wanted: jax.Array) -> jax.Array:
        return jnp.where(is_wanted, index, sizes.tiles)

    def fill(index: jax.Array, before: jax.Array) -> jax.Array:
        pair, expert = load_chunk(index, sizes.placed)
        is_ours = expert == ours
        rank = before + jnp.cumsum(is_ours.astype(jnp.int32)) - 1
        tile = place(first + jax.lax.div(rank, tile_m), is_ours)
        store(pairs_ref.at[tile, jax.lax.rem(rank, tile_m)], pair, mask=is_ours)
        return before + is_ours.astype(jnp.int32).sum()

    jax.lax.fori_loop(0, pl.cdiv(sizes.pairs, sizes.placed), fill, jnp.int32(0))
    row = jnp.arange(pl.next_power_of_2(tile_m))  # of the last tile, which may be partly empty
    is_empty = (own_tiles - 1) * tile_m + row >= jnp.where(own_tiles > 0, own_pairs, 2**30)
    if len(row) > tile_m:
        is_empty &= row < tile_m
    last = place(first + own_tiles - 1, is_empty)
    store(pairs_ref.at[last, row], jnp.full(row.shape, sizes.pairs, jnp.int32), mask=is_empty)
    tile = jnp.arange(pl.next_power_of_2(sizes.tiles))
    is_ours = (tile >= first) & (tile < first + own_tiles)
    is_unused = (tile >= tiles.sum()) & (tile < sizes.tiles) & (ours == 0)
    store(
        expert_ref.at[place(tile, is_ours | is_unused)],
        jnp.where(is_unused, -1, ours),
        mask=is_ours | is_unused,
    )
