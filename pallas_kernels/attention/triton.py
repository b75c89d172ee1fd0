"""Paged attention as a kernel: its launch, and which keys each of its programs reads.

A program owns a tile of rows, the (token, query head) pairs that share a KV head, and of the tiles
of that sequence's pages every `splits`-th one; decoding is the case of one token. Tokens that wait
in 16 bits (BitDecoding section IV-A) are read by programs of their own.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.attention import main_loop
from pallas_kernels.attention.combine import combine
from pallas_kernels.attention.rows import Sequence
from pallas_kernels.attention.source import Source
from pallas_kernels.attention.tuning import AttentionConfig
from pallas_kernels.kv_cache import residual as residuals
from pallas_kernels.kv_cache.cache import KVPages


def paged_attention(
    queries: jax.Array,
    pages: KVPages,
    block_tables: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    config: AttentionConfig,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    longest: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See api.paged_attention."""
    *leading, heads, dim = queries.shape
    batch, kv_heads = len(starts), pages.keys.shape[1]
    group = heads // kv_heads
    is_packed = len(leading) == 1
    offsets = jnp.cumsum(counts) - counts if is_packed else None
    longest = leading[-1] if longest is None or not is_packed else longest
    flat = queries.reshape(-1, heads, dim)
    kernel = functools.partial(
        _kernel,
        config=config,
        longest=longest,
        scale=scale,
        window=window,
        softcap=softcap,
        ptx=not interpret,
    )
    splits = config.splits + config.waiting_splits
    outputs, sums = backend.pallas_call(
        kernel,
        main_loop.Operands(flat, block_tables, starts, counts, offsets, sinks),
        pages,
        out_shape=(
            jax.ShapeDtypeStruct(
                (len(flat), heads, splits, dim), queries.dtype if splits == 1 else jnp.float32
            ),
            jax.ShapeDtypeStruct((len(flat), heads, splits), jnp.float32),
        ),
        grid=(pl.cdiv(longest * group, config.tile_rows), batch * kv_heads, splits),
        name=f"attention_{pages.format}".lower(),
        warps=config.warps,
        stages=config.stages,
        registers=config.registers,
        interpret=interpret,
    )
    if splits > 1:
        outputs = combine(outputs, sums, queries.dtype, interpret=interpret)
    return outputs.reshape(queries.shape)


def _kernel(
    operands: main_loop.Operands,
    pages: KVPages,
    out_ref: Any,  # [tokens, query heads, splits, dim]
    sums_ref: Any,  # [tokens, query heads, splits]
    *,
    config: AttentionConfig,
    **options: Any,
) -> None:
    kv_heads, capacity = pages.keys.shape[1], operands.block_tables.shape[1] * pages.page_size
    batch, head = pl.program_id(1) // kv_heads, pl.program_id(1) % kv_heads
    # The last tokens see the most keys: they come first, so that what ends last is short.
    first_row = (pl.num_programs(0) - 1 - backend.first_program_id()) * config.tile_rows
    split = pl.program_id(2)
    start = backend.load(operands.starts.at[batch])
    count = backend.load(operands.counts.at[batch])
    begin, end = jnp.int32(0), jnp.minimum(start + count, capacity)
    sequence = Sequence(batch, head, start, count)

    def attend(source: Source) -> None:
        loop = main_loop.MainLoop(operands, sequence, source, first_row, config=config, **options)
        loop.store(loop.run(), out_ref, sums_ref)

    residual, boundary = pages.residual, end
    if residual is not None:
        boundary = residuals.begin(end, residual.page_size)
    packed = Source(
        pages, operands.block_tables, begin, boundary, config.tile_keys, split, config.splits, split
    )
    if residual is None:
        attend(packed)
        return
    number = split - config.splits
    waiting = Source(
        residual, None, boundary, end, config.waiting_keys, number, config.waiting_splits, split
    )
    pl.when(number < 0)(lambda: attend(packed))
    pl.when(number >= 0)(lambda: attend(waiting))
