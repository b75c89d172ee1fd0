"""The rows of a tile: the pairs of a token and a query head that share a KV head."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mpjax.kernels.attention.tiles import Part, Words, cover
from mpjax.kernels.launch import join, load, load_masked

PAIRS = 4  # lanes of a warp that share one of eight rows, each with pairs of channels


class Sequence(NamedTuple):
    """Whose keys and queries a program reads."""

    batch: jax.Array
    head: jax.Array  # of keys and values
    start: jax.Array
    new_tokens: jax.Array


class Rows(NamedTuple):
    """Where a tile's rows are among the queries, [rows] each."""

    token: jax.Array
    query_head: jax.Array
    position: jax.Array  # in the sequence
    mask: jax.Array  # which there are
    real: jax.Array  # a number: how many the whole sequence has

    def locate(self, part: Part) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """Indices of the channels of a part, [rows, channels], and which there are."""
        channel, mask = part.channels()
        mask = self.mask[:, None] if mask is None else self.mask[:, None] & mask[None, :]
        return (self.token[:, None], self.query_head[:, None], channel[None, :]), mask

    def load(self, queries: Any, part: Part) -> jax.Array:
        """The rows' queries [rows, channels] of a part."""
        index, mask = self.locate(part)
        return load_masked(queries.at[index], mask)

    def load_few(self, queries: Any, part: Part) -> jax.Array:
        """The queries of eight rows and a part of a single plane, where the tensor cores want them.

        Triton would put them there at each tile, by shuffles or through shared memory. A lane has
        pairs of channels of a row, eight apart; a warp loads one of each lane's at a time.
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
        """The largest magnitude of each row, float32 [rows].

        It loads them for itself: what it shared with `load_few`, Triton would lay out for the
        maximum, and move from there.
        """
        found = []
        for words in cover(queries.shape[2]):
            q = self.load(queries, Part(words, range(1)))
            found.append(jnp.abs(q.astype(jnp.float32)).max(1))
        return functools.reduce(jnp.maximum, found)


def numbered(number: jax.Array, sequence: Sequence, group: int, longest: int, offsets: Any) -> Rows:
    """The rows of these numbers in a sequence; inside a kernel.

    group: query heads of a KV head. longest: tokens that a sequence may have. offsets: a reference
        to those of the sequences' first tokens among varlen ones, or None where they are padded.
    """
    batch, head, start, new_tokens = sequence
    real = new_tokens * group
    if offsets is None:
        first, mask = batch * longest, number < longest * group
    else:
        first, mask = load(offsets.at[batch]), number < real
    token, query_head = first + number // group, head * group + number % group
    return Rows(token, query_head, start + number // group, mask, real)
