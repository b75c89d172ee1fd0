"""The append kernel: quantises new keys and values and writes them into their pages, in place."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.kv_cache import residual as residuals
from pallas_kernels.kv_cache.cache import KVPages
from pallas_kernels.kv_cache.writing import Slot, find_slot, lanes, like, write

UNGROUPED_ROWS = 32  # of a piece of a block in which no tokens share a scale


def append(
    pages: KVPages,
    keys: jax.Array,
    values: jax.Array,
    block_tables: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    *,
    interpret: bool = False,
) -> KVPages:
    """See api.append; pages without a residual.

    One program for each new token and KV head; the pages are aliased.
    """
    batch, tokens, heads, _ = keys.shape
    operands = _Operands(block_tables, starts, counts, keys, values)
    first = len(operands)
    return backend.pallas_call(
        functools.partial(_kernel, interpret=interpret),
        operands,
        pages,
        out_shape=like(pages),
        grid=(batch * tokens, heads),
        name=f"append_{pages.format}".lower(),
        warps=1,
        stages=1,
        interpret=interpret,
        aliases={first + i: i for i in range(len(jax.tree.leaves(pages)))},
    )


def flush(
    pages: KVPages,
    keys: jax.Array | None,
    values: jax.Array | None,
    first_tokens: jax.Array,
    tokens: int,
    block_tables: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    *,
    interpret: bool = False,
) -> KVPages:
    """See reference.flush. One program for each piece of a block that may be full, and KV head.

    A piece is a group of tokens, where these have scales in common. The pages are aliased, the
    residual too, although it stays as it is: what writes to it next then comes after.
    """
    assert pages.residual is not None
    block = pages.residual.page_size
    rows = pages.format.group or min(UNGROUPED_ROWS, pages.page_size)
    blocks = residuals.most_blocks(tokens, block)
    operands = _FlushOperands(block_tables, starts, counts, first_tokens, keys, values)
    first = len(jax.tree.leaves(operands))
    return backend.pallas_call(
        functools.partial(_flush_kernel, rows=rows, blocks=blocks, interpret=interpret),
        operands,
        pages,
        out_shape=like(pages),
        grid=(len(starts) * blocks * (block // rows), pages.keys.shape[1]),
        name=f"flush_{pages.format}".lower(),
        warps=8 if rows > UNGROUPED_ROWS else 4,
        stages=1,
        interpret=interpret,
        aliases={first + i: i for i in range(len(jax.tree.leaves(pages)))},
    )


class _Operands(NamedTuple):
    """What the kernel reads; references, inside of it."""

    block_tables: Any  # [batch, pages per sequence]
    starts: Any  # [batch]
    counts: Any  # [batch]
    keys: Any  # [batch, tokens, KV heads, head dim]
    values: Any


def _kernel(operands: _Operands, before: KVPages, pages: KVPages, *, interpret: bool) -> None:
    tokens, dim = operands.keys.shape[1], operands.keys.shape[3]
    program = backend.first_program_id()
    batch, token = program // tokens, program % tokens
    head = pl.program_id(1)
    slot = find_slot(operands, pages.page_size, batch, token)
    for side, source in zip(pages.sides, (operands.keys, operands.values), strict=True):
        width = dim // side.codes.planes
        pieces = [
            backend.load(source.at[batch, token, head, plane * width + lanes(width)])
            for plane in range(side.codes.planes)
        ]
        write(side, pieces, source.dtype, slot, head, interpret)


class _FlushOperands(NamedTuple):
    """What the kernel reads; references, inside of it."""

    block_tables: Any  # [batch, pages per sequence]
    starts: Any  # [batch]
    counts: Any  # [batch]
    first_tokens: Any  # [batch]
    keys: Any  # [tokens, KV heads, head dim] or None
    values: Any


def _flush_kernel(
    operands: _FlushOperands,
    before: KVPages,
    pages: KVPages,
    *,
    rows: int,
    blocks: int,
    interpret: bool,
) -> None:
    residual = pages.residual
    assert residual is not None
    block, dim = residual.page_size, residual.head_dim
    pieces = block // rows
    program = backend.first_program_id()
    batch, piece = program // (blocks * pieces), program % (blocks * pieces)
    head = pl.program_id(1)
    capacity = operands.block_tables.shape[1] * pages.page_size
    start = backend.load(operands.starts.at[batch])
    end = start + backend.load(operands.counts.at[batch])
    first = residuals.begin(jnp.minimum(start, capacity), block) + piece * rows

    @pl.when(first < residuals.begin(jnp.minimum(end, capacity), block))
    def _() -> None:
        row = jnp.arange(rows)[:, None]
        is_new = first + row >= start
        token = jnp.maximum(backend.load(operands.first_tokens.at[batch]) + first + row - start, 0)
        page = backend.load(operands.block_tables.at[batch, first // pages.page_size])
        slot = Slot(page, first % pages.page_size, jnp.bool_(True))

        def load(waiting: Any, new: Any, channel: jax.Array) -> jax.Array:
            x = backend.load(waiting.at[batch, head, first % block + row, channel[None, :]])
            if new is None:
                return x
            at = new.at[token, head, channel[None, :]]
            return jnp.where(is_new, backend.load_masked(at, is_new).astype(x.dtype), x)

        sources = (
            (residual.keys, operands.keys),
            (residual.values, operands.values),
        )
        for side, source in zip(pages.sides, sources, strict=True):
            width = dim // side.codes.planes
            planes = [
                load(*source, plane * width + lanes(width)) for plane in range(side.codes.planes)
            ]
            write(side, planes, source[0].dtype, slot, head, interpret)
