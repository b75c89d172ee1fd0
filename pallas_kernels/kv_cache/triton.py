"""The append kernel: quantises new keys and values and writes them into their pages, in place."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.kv_cache import quantize
from pallas_kernels.kv_cache.cache import KVPages, Side

_IN_KERNEL = quantize.Arithmetic(
    divide=backend.divide, round=lambda x, dtype: x.astype(dtype).astype(jnp.float32)
)


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
    """See api.append. One program for each new token and KV head; the pages are aliased."""
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


def like(pages: KVPages) -> KVPages:
    """The shapes of the pages, for a kernel that takes over their buffers."""
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), pages)


class _Operands(NamedTuple):
    """What the kernel reads; references, inside of it."""

    block_tables: Any  # [batch, pages per sequence]
    starts: Any  # [batch]
    counts: Any  # [batch]
    keys: Any  # [batch, tokens, KV heads, head dim]
    values: Any


def _kernel(operands: _Operands, before: KVPages, pages: KVPages, *, interpret: bool) -> None:
    tokens, dim = operands.keys.shape[1], operands.keys.shape[3]
    batch, token = pl.program_id(0) // tokens, pl.program_id(0) % tokens
    head = pl.program_id(1)
    slot = find_slot(operands, pages.page_size, batch, token)
    for side, source in zip(pages.sides, (operands.keys, operands.values), strict=True):
        width = dim // side.codes.planes
        pieces = [
            backend.load(source.at[batch, token, head, plane * width + lanes(width)])
            for plane in range(side.codes.planes)
        ]
        write(side, pieces, source.dtype, slot, head, interpret)


class Slot(NamedTuple):
    """Where a token goes in the pages, and whether it goes there at all."""

    page: jax.Array
    position: jax.Array
    valid: jax.Array


def find_slot(tables: Any, page_size: int, batch: jax.Array, token: jax.Array) -> Slot:
    """The slot of a new token, in a kernel. `tables` has block_tables, starts and counts."""
    position = backend.load(tables.starts.at[batch]) + token
    entry = position // page_size
    entries = tables.block_tables.shape[1]
    valid = (token < backend.load(tables.counts.at[batch])) & (entry < entries)
    page = backend.load(tables.block_tables.at[batch, jnp.minimum(entry, entries - 1)])
    return Slot(page, position % page_size, valid)


def lanes(width: int) -> jax.Array:
    """0 … width − 1, and the last again up to a power of two, which changes no extremum."""
    lane = jnp.arange(pl.next_power_of_2(width))
    # Of a minimum the compiler doesn't see that lanes are neighbours, and loads them one by one.
    return lane if len(lane) == width else jnp.minimum(lane, width - 1)


def write(
    side: Side,
    pieces: Sequence[jax.Array],
    dtype: jnp.dtype,
    slot: Slot,
    head: jax.Array,
    interpret: bool,
) -> None:
    """Encodes a head's key or value and stores it, in a kernel.

    pieces: equal slices of its channels, as many as the codes have planes, or a multiple; each at
        its `lanes`.
    dtype: of the vector, which decides that of its parameters.
    """
    scale = None
    if side.codes.scaling == "head":
        scale = backend.load(side.parameters.at[head + jnp.arange(1)])
    arithmetic = quantize.PLAIN if interpret else _IN_KERNEL
    slices, parameters = side.codes.encode(pieces, scale, dtype, arithmetic)
    width = side.words.shape[3] // len(slices)
    for i, words in enumerate(slices):
        lane = jnp.arange(len(words))
        target = side.words.at[slot.page, head, slot.position, i * width + lane]
        mask = slot.valid & (lane < width)
        backend.store(target, words.astype(side.words.dtype), mask=mask)
    if parameters is not None:
        target = side.parameters.at[slot.page, head, slot.position + jnp.arange(1)]
        backend.store(target, parameters, mask=jnp.broadcast_to(slot.valid, (1,)))
