"""Paged attention as a Triton kernel: its launch, and the keys for each program.

A program has a tile of rows, which are (token, query head) pairs of one sequence that share a KV
head, and processes every `splits`-th tile of the sequence's packed keys; decoding is the case of
one token. The residual, the last tokens in 16 bits (BitDecoding section IV-A), is processed by
further programs of the sequence, or if the GPU has no room for these, by the same programs, which
continue their softmax. If sequences may be long, programs that have finished their own tiles
process surplus tiles of longer sequences (`balance`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels.activation_blocks import BLOCK, ActivationBlocks
from mpjax.kernels.activations import QuantizedActivations
from mpjax.kernels.attention import balance, main_loop
from mpjax.kernels.attention.combine import Partials, combine, combine_balanced
from mpjax.kernels.attention.key_range import KeyRange
from mpjax.kernels.attention.latent_loop import LatentLoop, LatentQueries
from mpjax.kernels.attention.plans import AttentionConfig
from mpjax.kernels.attention.rounding import RoundedHeads
from mpjax.kernels.attention.rows import SequenceHead, most_varlen_tiles, varlen_tile
from mpjax.kernels.attention.softmax_partial import SoftmaxPartial
from mpjax.kernels.batch import Span
from mpjax.kernels.kv_cache import residual as residuals
from mpjax.kernels.kv_cache.cache import KVPages
from mpjax.kernels.launch import Settings, first_program_id, launch, load
from mpjax.kernels.masks import Masks


def paged_attention(
    queries: jax.Array | LatentQueries,
    pages: KVPages,
    span: Span,
    masks: Masks,
    config: AttentionConfig,
    *,
    blocks: ActivationBlocks | None = None,
    interpret: bool = False,
) -> jax.Array | QuantizedActivations:
    """Launches the kernel; arguments and result as for api.paged_attention.

    queries: also LatentQueries, for attention over latents; then the result is that of
        `latent_attention`.
    span: the result of `Span.read`, so that its `longest` is known.
    blocks: the activation blocks of the result [..., heads · head dim]; see `rounding.can_round`.
        The kernel that joins programs rounds, or without it a program with heads of one block. For
        larger heads of a single program the result is an array nevertheless.
    """
    rotated, loop = None, main_loop.MainLoop
    if isinstance(queries, LatentQueries):
        (queries, rotated), loop = queries, LatentLoop
        rotated = rotated.reshape(-1, *rotated.shape[-2:])
    *leading, heads, dim = queries.shape
    kv_heads = pages.keys.shape[1]
    is_varlen = len(leading) == 1
    offsets = span.offsets if is_varlen else None
    flat = queries.reshape(-1, heads, dim)
    assert not (config.is_balanced and is_varlen), "varlen tokens can't be balanced"
    batch, own = len(span.starts), config.programs
    shapes = (_balanced_shapes if config.is_balanced else _shapes)(flat, batch, config)
    bits = None
    if blocks is not None and own == 1 and not config.is_balanced and dim == BLOCK:
        shapes = Partials(RoundedHeads.shapes(len(flat), heads, dim), None)
        bits = blocks.bits
    group = heads // kv_heads
    if is_varlen:
        tiles = most_varlen_tiles(len(flat) * group, batch, config.tile_rows)
        grid = (tiles, kv_heads, own)
    else:
        tiles = pl.cdiv(span.most_tokens * group, config.tile_rows)
        grid = (tiles, batch * kv_heads, own)
    (partials,) = launch(
        functools.partial(_kernel, config=config, loop=loop),
        main_loop.Operands(flat, span, offsets, masks, bits, rotated),
        pages,
        out_shape=(shapes,),
        grid=grid,
        settings=Settings(
            f"{loop.name}_{pages.format}".lower(),
            warps=config.warps,
            stages=config.stages,
            registers=config.registers,
        ),
        interpret=interpret,
    )
    rest: dict[str, Any] = {"blocks": blocks, "interpret": interpret}
    if config.is_balanced:
        outputs = combine_balanced(partials, len(flat), queries.dtype, own=own, **rest)
    elif own > 1:
        outputs = combine(partials.outputs, partials.log2_totals, queries.dtype, **rest)
    else:
        outputs = partials.outputs
    if isinstance(outputs, RoundedHeads):
        return outputs.activations(tuple(leading), queries.dtype)
    return outputs.reshape(queries.shape)


def _shapes(queries: jax.Array, _: int, config: AttentionConfig) -> Partials:
    """The shapes of the partials if programs don't help each other."""
    (tokens, heads, dim), programs = queries.shape, config.programs
    dtype = jnp.float32 if programs > 1 else queries.dtype
    return Partials(
        jax.ShapeDtypeStruct((tokens, heads, programs, dim), dtype),
        jax.ShapeDtypeStruct((tokens, heads, programs), jnp.float32),
    )


def _balanced_shapes(queries: jax.Array, batch: int, config: AttentionConfig) -> Partials:
    """The shapes of the partials if programs help each other."""
    (tokens, heads, dim), own = queries.shape, config.programs
    rows = balance.slots(batch, own, config.splits) * (tokens // batch)
    numbers = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return Partials(
        jax.ShapeDtypeStruct((rows, heads, 1, dim), jnp.float32),
        jax.ShapeDtypeStruct((rows, heads, 1), jnp.float32),
        numbers,
        numbers,
        jax.ShapeDtypeStruct((tokens, heads, 1, dim), queries.dtype) if own == 1 else None,
    )


def _kernel(
    operands: main_loop.Operands,
    pages: KVPages,
    partials: Partials,
    *,
    config: AttentionConfig,
    loop: type[main_loop.MainLoop],
) -> None:
    batch, head, first_row = _place(operands, pages.keys.shape[1], config.tile_rows)
    split = pl.program_id(2)
    program = _Program(operands, pages, config, head, first_row, loop)
    if partials.first_pieces is None:

        def store_split(partial: SoftmaxPartial) -> None:
            if isinstance(partials.outputs, RoundedHeads):
                partial.store_rounded(partials.outputs, operands.bits)
                return
            partial.store(partials.outputs, partials.log2_totals, split)

        program.attend(batch, split, store=store_split)
        return

    # Programs help each other: this one processes its own tiles, then pieces of other programs'
    # surplus.
    find_shares = functools.partial(
        balance.Balance,
        operands.span.starts,
        operands.span.counts,
        program.tiles,
        splits=config.splits,
        own=config.programs,
    )

    def perform(shares: balance.Balance, task: balance.Task) -> None:
        """Processes the task's tiles; stores the partial softmax in its slot, or the output."""

        def store_slot(partial: SoftmaxPartial) -> None:
            shift = (task.slot - task.batch) * operands.span.most_tokens
            partial.store(partials.outputs, partials.log2_totals, 0, shift)

        def store(partial: SoftmaxPartial) -> None:
            if partials.whole_outputs is None or task.is_piece:
                store_slot(partial)
                return
            pl.when(~task.is_whole)(lambda: store_slot(partial))
            pl.when(task.is_whole)(lambda: partial.store(partials.whole_outputs, None, 0))

        shares.store_pieces(task, partials, mask=(head == 0) & (first_row == 0))
        program.attend(task.batch, task.split, task, store=store)

    shares = find_shares()
    if not config.has_one_loop:
        perform(shares, shares.own_task(batch, split))
        # Pieces have a second loop, and shares are computed again for it. The compiler can't merge
        # the two computations across stores, so the first loop, over own tiles, keeps nothing for
        # pieces in registers.
        shares = find_shares()
    pieces = shares.pieces(batch, split)

    def perform_next(number: jax.Array, begin: jax.Array) -> jax.Array:
        rest = batch, split, begin, pieces.end
        task, begin = shares.any_task(number, *rest) if config.has_one_loop else shares.piece(*rest)
        perform(shares, task)
        return begin

    jax.lax.fori_loop(0, int(config.has_one_loop) + pieces.sequences, perform_next, pieces.begin)


def _place(
    operands: main_loop.Operands, kv_heads: int, tile_rows: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The program's sequence, its KV head, and the index of its tile's first row."""
    batch, head = pl.program_id(1) // kv_heads, pl.program_id(1) % kv_heads
    # The last tokens of a sequence attend to the most keys. Their programs start first, so that the
    # kernel ends with short ones.
    tile = pl.num_programs(0) - 1 - first_program_id()
    if operands.offsets is None:
        return batch, head, tile * tile_rows
    group = operands.queries.shape[1] // kv_heads
    batch, first_row = varlen_tile(operands.span.counts, tile, group, tile_rows)
    return batch, head, first_row


class _Program(NamedTuple):
    """A program of the kernel: its inputs, and its tile of rows."""

    operands: main_loop.Operands
    pages: KVPages
    config: AttentionConfig
    head: jax.Array  # the KV head
    first_row: jax.Array  # the index of the tile's first row in its sequence
    loop: type[main_loop.MainLoop]

    def attend(
        self,
        batch: jax.Array,
        split: jax.Array,
        task: balance.Task | None = None,
        *,
        store: Callable[[SoftmaxPartial], None],
    ) -> None:
        """Attends to the program's share of a sequence's keys, and stores the partial softmax.

        batch: the sequence's index. split: the program's index in the sequence, from 0; -1 for a
            piece of another program's surplus.
        task: the tiles to process; None for every `splits`-th tile of the sequence.
        store: stores the partial softmax.
        """
        pages, config, span = self.pages, self.config, self.operands.span
        start = load(span.starts.at[batch])
        count = load(span.counts.at[batch])
        end, packed_end = self._ends(start, count)
        sequence = SequenceHead(batch, self.head, start, count)
        residual = pages.residual

        def attend_to(key_range: KeyRange, after: SoftmaxPartial | None = None) -> SoftmaxPartial:
            return self.loop(
                self.operands, sequence, key_range, self.first_row, config=config, after=after
            ).run()

        tables = span.block_tables
        pages_of_sequence = (pages, tables, jnp.int32(0), packed_end, config.tile_keys)
        if task is None:
            packed = KeyRange(*pages_of_sequence, split, config.splits, split)
        else:
            most = pl.cdiv(tables.shape[1] * pages.page_size, config.tile_keys * config.splits)
            most = balance.most_tiles(most)
            packed = KeyRange(*pages_of_sequence, task.first, task.stride, split, most, task.end)
        if residual is None or (task is not None and task.is_piece):
            store(attend_to(packed))
            return
        in_residual = functools.partial(
            KeyRange, residual, span.residual_pages, packed_end, tile_keys=config.residual_keys
        )
        if config.residual_splits:
            number = split - config.splits
            rest = in_residual(end, number=number, programs=config.residual_splits, split=split)
            pl.when(number < 0)(lambda: store(attend_to(packed)))
            pl.when(number >= 0)(lambda: store(attend_to(rest)))
            return
        # The program continues its softmax over the residual, with split −1, so that the sink is
        # not added twice. For a piece of another program's surplus, the residual is an empty range.
        end = jnp.where(split < 0, packed_end, end)
        number, none = jnp.maximum(split, 0), jnp.int32(-1)
        rest = in_residual(end, number=number, programs=config.splits, split=none)
        store(attend_to(rest, attend_to(packed)))

    def tiles(self, start: jax.Array, count: jax.Array) -> jax.Array:
        """The number of tiles of packed keys for each sequence's new tokens; 0 without tokens.

        start, count: int32 [sequences], the position of the first new token and the number of new
            tokens, as in Span.
        """
        size, masks = self.config.tile_keys, self.operands.masks
        end = pl.cdiv(self._ends(start, count)[1], size)
        begin = 0 if masks.window is None else jnp.maximum(masks.first_key(start), 0) // size
        return jnp.where(count > 0, jnp.maximum(end - begin, 0), 0)

    def _ends(self, start: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The positions after a sequence's last token, and after its last packed token."""
        capacity = self.operands.span.block_tables.shape[1] * self.pages.page_size
        end = jnp.minimum(start + count, capacity)
        residual = self.pages.residual
        return end, end if residual is None else residuals.begin(end, residual.page_size)
