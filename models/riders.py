"""Spans of mixed batches: programs that read prompts and decode one token of other rows."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mpjax.kernels import PagedKVCache, Span


class Part(NamedTuple):
    """The tokens from `begin` to before `end` of an array, and their span.

    is_rows: whether they become [rows, 1]; else they stay varlen, [tokens].
    """

    span: Span
    begin: int
    end: int
    is_rows: bool

    def of(self, x: jax.Array, leading: int = 0) -> jax.Array:
        """The part of x [..., tokens, ...], where `leading` axes come before the tokens."""
        x = jax.lax.slice_in_dim(x, self.begin, self.end, axis=leading)
        return jnp.expand_dims(x, leading + 1) if self.is_rows else x


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["prompts", "rows"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class RidersSpan:
    """The tokens of a mixed batch: varlen tokens of prompts, then one token of each decoding row.

    Products of a layer run over all tokens together. Attention runs apart over the two parts: that
    of prompts is for many queries of a sequence, that of rows for one.

    prompts: of the first tokens, varlen. rows: of the last ones, of which each is a sequence's
    only one; a row with the count 0 has none.
    """

    prompts: Span
    rows: Span

    @classmethod
    def of(cls, cache: PagedKVCache, counts: jax.Array, encoded: Any, riders: int) -> RidersSpan:
        """The span of the cache's sequences, of which the last `riders` are rows.

        encoded: as in Span, of the other sequences; or None.
        """
        at, residuals = len(counts) - riders, cache.residual_pages
        if residuals is None and cache.format.block is not None:
            residuals = jnp.arange(len(counts), dtype=jnp.int32)[:, None]

        def part(own: slice) -> Span:
            return Span(
                cache.block_tables[own],
                cache.lengths[own],
                counts[own],
                residual_pages=None if residuals is None else residuals[own],
            )

        prompts = dataclasses.replace(part(slice(None, at)), encoded=encoded)
        return cls(prompts, part(slice(at, None)))

    @property
    def fresh(self) -> bool:
        """Whether all starts are known to be 0: never."""
        return False

    @property
    def block_tables(self) -> jax.Array:
        """The block tables of the prompts, which have as many entries as those of the rows."""
        return self.prompts.block_tables

    def parts(self, tokens: int) -> tuple[Part, Part]:
        """The two parts of an array of `tokens` tokens."""
        at = tokens - len(self.rows.starts)
        return Part(self.prompts, 0, at, is_rows=False), Part(self.rows, at, tokens, is_rows=True)


def last_tokens(span: Span | RidersSpan, tokens: int) -> jax.Array:
    """The index of each sequence's last token among `tokens` varlen ones, int32 [batch]."""
    prompts = span if isinstance(span, Span) else span.prompts
    ends = jnp.maximum(prompts.offsets + prompts.counts - 1, 0)
    if isinstance(span, Span):
        return ends
    first = tokens - len(span.rows.starts)
    return jnp.concatenate([ends, jnp.arange(first, tokens, dtype=ends.dtype)])


def last_hidden(hidden: jax.Array, counts: jax.Array) -> jax.Array:
    """The hidden state of each row's last token, [batch, hidden]; counts: tokens of each row."""
    if hidden.shape[1] == 1:
        return hidden[:, 0]
    last = jnp.maximum(counts - 1, 0)
    return jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
