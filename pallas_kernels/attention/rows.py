"""The rows of a tile of attention.

A row is a pair of a new token and a query head. The rows of a tile belong to one sequence and share
one KV head. Row i of a sequence is token i // group and, of that token, query head i % group.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels.attention.tiles import Part, Words, cover
from mpjax.kernels.launch import join, load, load_masked
from mpjax.kernels.registers import WARP

PAIRS = 4  # the lanes of a warp that share each of eight rows; a lane holds pairs of channels


class SequenceHead(NamedTuple):
    """The sequence and the KV head of a program; scalars, int32."""

    batch: jax.Array  # the sequence's index
    head: jax.Array  # the KV head
    start: jax.Array  # the position of the first new token
    new_tokens: jax.Array  # the number of new tokens


class Rows(NamedTuple):
    """The indices of a tile's rows in the queries [tokens, query heads, head dim]; [rows] each."""

    token: jax.Array  # the index along the queries' first axis
    query_head: jax.Array
    position: jax.Array  # of the token in its sequence
    mask: jax.Array  # whether the row exists, as padding or a real token
    real: jax.Array  # a scalar: the number of the sequence's rows without padding

    def locate(self, part: Part) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """Indices of a part's elements in the queries, and the mask of elements that exist.

        Indices of tokens, query heads and channels broadcast to [rows, channels], as the mask does.
        """
        channel, mask = part.channels()
        mask = self.mask[:, None] if mask is None else self.mask[:, None] & mask[None, :]
        return (self.token[:, None], self.query_head[:, None], channel[None, :]), mask

    def load(self, queries: Any, part: Part) -> jax.Array:
        """Loads the queries [rows, channels] of a part; zeros where the mask is false."""
        index, mask = self.locate(part)
        return load_masked(queries.at[index], mask)

    def load_few(self, queries: Any, part: Part) -> jax.Array:
        """`load` for eight rows and a part of one plane, in the layout of a tensor-core operand.

        Otherwise Triton would change the layout for every tile of keys, by shuffles or through
        shared memory. In this layout a lane has pairs of channels of one row, each pair eight
        channels after the last. Each load gives every lane of a warp one channel.
        """
        first, size, width = part.words.first, part.words.size, part.words.width

        def load(begin: int) -> jax.Array:
            return self.load(queries, Part(Words(begin, PAIRS, width, stride=2), part.planes))

        evens, odds = (
            join([load(first + odd + eight) for eight in range(0, size, 2 * PAIRS)])
            for odd in range(2)
        )
        return jnp.stack([evens, odds], -1).reshape(-1, size)

    def largest(self, queries: Any) -> jax.Array:
        """The largest magnitude of each row of queries, float32 [rows].

        It loads the queries again: with the loads of `load_few`, Triton would give the queries the
        layout of the maximum, and would have to change it afterwards.
        """
        largest = []
        for words in cover(queries.shape[2]):
            q = self.load(queries, Part(words, range(1)))
            largest.append(jnp.abs(q.astype(jnp.float32)).max(1))
        return functools.reduce(jnp.maximum, largest)


def most_varlen_tiles(rows: int, sequences: int, tile_rows: int) -> int:
    """The most tiles of varlen sequences together; each tile has rows of only one sequence.

    rows: the number of rows of all sequences that share a KV head.
    """
    return (rows + sequences * (tile_rows - 1)) // tile_rows


def varlen_tile(
    counts: Any, number: jax.Array, group: int, tile_rows: int
) -> tuple[jax.Array, jax.Array]:
    """The sequence of a tile, and the index of the tile's first row in it; inside a kernel.

    counts: a reference int32 [batch], the numbers of new tokens of varlen sequences, whose tiles
        are numbered one sequence after another. Larger numbers are tiles of padding after the last
        sequence.
    """
    sequences = counts.shape[0]
    lane = jnp.arange(max(WARP, pl.next_power_of_2(sequences)))
    tokens = load(counts.at[lane], mask=lane < sequences, other=0)
    tiles = (tokens * group + tile_rows - 1) // tile_rows
    ends = jnp.cumsum(tiles)
    is_before = (ends <= number) & (lane < sequences - 1)
    first_tile = jnp.where(is_before, tiles, 0).sum()
    return is_before.astype(jnp.int32).sum(), (number - first_tile) * tile_rows


def rows_of(
    number: jax.Array, sequence: SequenceHead, group: int, longest: int, offsets: Any
) -> Rows:
    """The rows with the given indices [rows] in a sequence; inside a kernel.

    group: query heads for each KV head.
    longest: the most new tokens of a sequence; padded queries have this many for each.
    offsets: a reference int32 [batch] to the index of each sequence's first token among varlen
        tokens; None if queries are padded.
    """
    batch, head, start, new_tokens = sequence
    real = new_tokens * group
    if offsets is None:
        first, mask = batch * longest, number < longest * group
    else:
        first, mask = load(offsets.at[batch]), number < real
    token, query_head = first + number // group, head * group + number % group
    return Rows(token, query_head, start + number // group, mask, real)
