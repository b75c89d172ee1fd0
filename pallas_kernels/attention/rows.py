"""The rows of a tile: the pairs of a token and a query head that share a KV head."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from pallas_kernels import backend
from pallas_kernels.attention.tiles import Part


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


def numbered(number: jax.Array, sequence: Sequence, group: int, longest: int, offsets: Any) -> Rows:
    """The rows of these numbers in a sequence; inside a kernel.

    group: query heads of a KV head. longest: tokens that a sequence may have. offsets: a reference
        to those of the sequences' first tokens among packed ones, or None where they are padded.
    """
    batch, head, start, new_tokens = sequence
    real = new_tokens * group
    if offsets is None:
        first, mask = batch * longest, number < longest * group
    else:
        first, mask = backend.load(offsets.at[batch]), number < real
    token, query_head = first + number // group, head * group + number % group
    return Rows(token, query_head, start + number // group, mask, real)
