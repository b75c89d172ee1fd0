"""Paged attention as a kernel: its launch, and which keys each of its programs reads.

A program owns a tile of rows, the (token, query head) pairs that share a KV head, and of the tiles
of that sequence's pages every `splits`-th one; decoding is the case of one token. Tokens that wait
in 16 bits (BitDecoding section IV-A) are read by programs of their own, or where there is no room
for these, by the same ones, which go on from what they found. Where sequences may be long, those of
short ones then help (`balance`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels.attention import balance, main_loop
from mpjax.kernels.attention.combine import Parts, combine, combine_balanced
from mpjax.kernels.attention.plans import AttentionConfig
from mpjax.kernels.attention.result import Result
from mpjax.kernels.attention.rows import Sequence
from mpjax.kernels.attention.source import Source
from mpjax.kernels.batch import Span
from mpjax.kernels.kv_cache import residual as residuals
from mpjax.kernels.kv_cache.cache import KVPages
from mpjax.kernels.launch import Settings, first_program_id, launch, load
from mpjax.kernels.masks import Masks


def paged_attention(
    queries: jax.Array,
    pages: KVPages,
    span: Span,
    masks: Masks,
    config: AttentionConfig,
    *,
    interpret: bool = False,
) -> jax.Array:
    """See api.paged_attention. The span is one that has been read: its `longest` is known."""
    *leading, heads, dim = queries.shape
    kv_heads = pages.keys.shape[1]
    is_varlen = len(leading) == 1
    offsets = span.offsets if is_varlen else None
    flat = queries.reshape(-1, heads, dim)
    assert not (config.is_balanced and is_varlen), "of varlen tokens, no program helps another"
    batch, own = len(span.starts), config.programs
    found = (_balanced_parts if config.is_balanced else _parts)(flat, batch, config)
    tiles = pl.cdiv(span.most_tokens * (heads // kv_heads), config.tile_rows)
    (parts,) = launch(
        functools.partial(_kernel, config=config),
        main_loop.Operands(flat, span, offsets, masks),
        pages,
        out_shape=(found,),
        grid=(tiles, batch * kv_heads, own),
        settings=Settings(
            f"attention_{pages.format}".lower(),
            warps=config.warps,
            stages=config.stages,
            registers=config.registers,
        ),
        interpret=interpret,
    )
    if config.is_balanced:
        outputs = combine_balanced(parts, len(flat), queries.dtype, own=own, interpret=interpret)
    elif own > 1:
        outputs = combine(parts.outputs, parts.sums, queries.dtype, interpret=interpret)
    else:
        outputs = parts.outputs
    return outputs.reshape(queries.shape)


def _parts(queries: jax.Array, _: int, config: AttentionConfig) -> Parts:
    """What each of a sequence's programs finds, for each of its tokens."""
    (tokens, heads, dim), programs = queries.shape, config.programs
    dtype = jnp.float32 if programs > 1 else queries.dtype
    return Parts(
        jax.ShapeDtypeStruct((tokens, heads, programs, dim), dtype),
        jax.ShapeDtypeStruct((tokens, heads, programs), jnp.float32),
    )


def _balanced_parts(queries: jax.Array, batch: int, config: AttentionConfig) -> Parts:
    """What all programs find, of which some help others."""
    (tokens, heads, dim), own = queries.shape, config.programs
    rows = balance.slots(batch, own, config.splits) * (tokens // batch)
    numbers = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return Parts(
        jax.ShapeDtypeStruct((rows, heads, 1, dim), jnp.float32),
        jax.ShapeDtypeStruct((rows, heads, 1), jnp.float32),
        numbers,
        numbers,
        jax.ShapeDtypeStruct((tokens, heads, 1, dim), queries.dtype) if own == 1 else None,
    )


def _kernel(
    operands: main_loop.Operands, pages: KVPages, parts: Parts, *, config: AttentionConfig
) -> None:
    kv_heads, split = pages.keys.shape[1], pl.program_id(2)
    batch, head = pl.program_id(1) // kv_heads, pl.program_id(1) % kv_heads
    # The last tokens see the most keys: they come first, so that what ends last is short.
    first_row = (pl.num_programs(0) - 1 - first_program_id()) * config.tile_rows
    program = _Program(operands, pages, config, head, first_row)
    if parts.firsts is None:
        program.attend(
            batch, split, store=lambda found: found.store(parts.outputs, parts.sums, split)
        )
        return

    find_shares = functools.partial(
        balance.Balance,
        operands.span.starts,
        operands.span.counts,
        program.tiles,
        splits=config.splits,
        own=config.programs,
    )

    def perform(shares: balance.Balance, task: balance.Task) -> None:
        def store_part(found: Result) -> None:
            shift = (task.slot - task.batch) * operands.span.most_tokens
            found.store(parts.outputs, parts.sums, 0, shift)

        def store(found: Result) -> None:
            if parts.whole is None or task.is_piece:
                store_part(found)
                return
            pl.when(~task.is_whole)(lambda: store_part(found))
            pl.when(task.is_whole)(lambda: found.store(parts.whole, None, 0))

        shares.tell(task, parts, tells=(head == 0) & (first_row == 0))
        program.attend(task.batch, task.split, task, store=store)

    shares = find_shares()
    if not config.has_one_loop:
        perform(shares, shares.own_task(batch, split))
        # Pieces have a loop of their own, and shares are found once more for it, which the compiler
        # can't merge past stores: own tiles are read with nothing for pieces in registers.
        shares = find_shares()
    pieces = shares.pieces(batch, split)

    def perform_next(number: jax.Array, begin: jax.Array) -> jax.Array:
        left = batch, split, begin, pieces.end
        task, begin = shares.any_task(number, *left) if config.has_one_loop else shares.piece(*left)
        perform(shares, task)
        return begin

    jax.lax.fori_loop(0, int(config.has_one_loop) + pieces.number, perform_next, pieces.begin)


class _Program(NamedTuple):
    """What one program is given, and the rows that it owns: a tile of those of a KV head."""

    operands: main_loop.Operands
    pages: KVPages
    config: AttentionConfig
    head: jax.Array
    first_row: jax.Array

    def attend(
        self,
        batch: jax.Array,
        split: jax.Array,
        task: balance.Task | None = None,
        *,
        store: Callable[[Result], None],
    ) -> None:
        """Reads the share of the program `split` of a sequence, or that of its task, and stores."""
        pages, config, span = self.pages, self.config, self.operands.span
        start = load(span.starts.at[batch])
        count = load(span.counts.at[batch])
        end, boundary = self._ends(start, count)
        sequence = Sequence(batch, self.head, start, count)
        residual = pages.residual

        def see(source: Source, after: Result | None = None) -> Result:
            loop = main_loop.MainLoop(
                self.operands, sequence, source, self.first_row, config=config, after=after
            )
            return loop.run()

        tables = span.block_tables
        source = (pages, tables, jnp.int32(0), boundary, config.tile_keys)
        if task is None:
            packed = Source(*source, split, config.splits, split)
        else:
            most = pl.cdiv(tables.shape[1] * pages.page_size, config.tile_keys * config.splits)
            most = balance.most_tiles(most)
            packed = Source(*source, task.first, task.stride, split, most, task.end)
        if residual is None or (task is not None and task.is_piece):
            store(see(packed))
            return
        waiting = functools.partial(Source, residual, None, boundary, tile_keys=config.waiting_keys)
        if config.waiting_splits:
            number = split - config.splits
            waits = waiting(end, number=number, programs=config.waiting_splits, split=split)
            pl.when(number < 0)(lambda: store(see(packed)))
            pl.when(number >= 0)(lambda: store(see(waits)))
            return
        # A program's second loop has no sink; nor does one that only helps read what waits.
        end = jnp.where(split < 0, boundary, end)
        number, none = jnp.maximum(split, 0), jnp.int32(-1)
        waits = waiting(end, number=number, programs=config.splits, split=none)
        store(see(waits, see(packed)))

    def tiles(self, start: jax.Array, count: jax.Array) -> jax.Array:
        """How many tiles of what is packed a sequence's new token sees."""
        size, window = self.config.tile_keys, self.operands.masks.window
        end = pl.cdiv(self._ends(start, count)[1], size)
        begin = 0 if window is None else jnp.maximum(start - window + 1, 0) // size
        return jnp.where(count > 0, jnp.maximum(end - begin, 0), 0)

    def _ends(self, start: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The positions behind a sequence's last token, and behind what is packed."""
        capacity = self.operands.span.block_tables.shape[1] * self.pages.page_size
        end = jnp.minimum(start + count, capacity)
        residual = self.pages.residual
        return end, end if residual is None else residuals.begin(end, residual.page_size)
