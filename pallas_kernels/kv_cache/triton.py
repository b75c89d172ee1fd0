"""The append kernel: quantises new keys and values and writes them into their pages, in place."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.bits import pack_pair
from pallas_kernels.kv_cache import quantize
from pallas_kernels.kv_cache.cache import KVFormat, KVPages

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
    stored, structure = jax.tree.flatten(pages)  # keys, values, and their parameters if any
    inputs = (block_tables, starts, counts, keys, values)
    written = backend.pallas_call(
        functools.partial(_kernel, format=pages.format, interpret=interpret),
        *inputs,
        *stored,
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in stored],
        grid=(batch * tokens, heads),
        name=f"append_kv{pages.format.bits}",
        warps=1,
        stages=1,
        interpret=interpret,
        aliases={len(inputs) + i: i for i in range(len(stored))},
    )
    return jax.tree.unflatten(structure, written)


def _kernel(
    block_tables_ref: Any,  # [batch, pages per sequence]
    starts_ref: Any,  # [batch]
    counts_ref: Any,  # [batch]
    keys_ref: Any,  # [batch, tokens, KV heads, head dim]
    values_ref: Any,
    *page_refs: Any,  # the pages as inputs, then as outputs
    format: KVFormat,
    interpret: bool,
) -> None:
    outputs = page_refs[len(page_refs) // 2 :]
    tokens, dim = keys_ref.shape[1], keys_ref.shape[3]
    batch, token = pl.program_id(0) // tokens, pl.program_id(0) % tokens
    head = pl.program_id(1)
    tables = _Tables(block_tables_ref, starts_ref, counts_ref)
    slot = find_slot(tables, outputs[0].shape[2], batch, token)
    lane = jnp.arange(dim // format.planes)
    for source, index in ((keys_ref, 0), (values_ref, 1)):
        planes = [
            backend.load(source.at[batch, token, head, plane * len(lane) + lane])
            for plane in range(format.planes)
        ]
        write(outputs, index, planes, source.dtype, slot, head, format, interpret)


class _Tables(NamedTuple):
    block_tables: Any
    starts: Any
    counts: Any


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


def write(
    page_refs: Sequence[Any],
    index: int,
    pieces: list[jax.Array],
    dtype: jnp.dtype,
    slot: Slot,
    head: jax.Array,
    format: KVFormat,
    interpret: bool,
) -> None:
    """Quantises a head's key (index 0) or value (1) and stores it, in a kernel.

    pieces: the channels in order, as many pieces as the format has planes, or more without them.
    dtype: of the vector, which decides that of its parameters.
    """
    if not format.is_quantized:
        for piece, values in enumerate(pieces):
            lane = piece * len(values) + jnp.arange(len(values))
            target = page_refs[index].at[slot.page, head, slot.position, lane]
            mask = jnp.broadcast_to(slot.valid, values.shape)
            backend.store(target, values.astype(page_refs[index].dtype), mask=mask)
        return
    words, parameters = _encode(pieces, dtype, format.bits, interpret)
    target = page_refs[index].at[slot.page, head, slot.position, jnp.arange(len(words))]
    backend.store(target, words, mask=jnp.broadcast_to(slot.valid, words.shape))
    target = page_refs[2 + index].at[slot.page, head, slot.position + jnp.arange(1)]
    backend.store(target, parameters, mask=jnp.broadcast_to(slot.valid, (1,)))


def _encode(
    planes: list[jax.Array], dtype: jnp.dtype, bits: int, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Words [width] and parameters [1] of one head."""
    arithmetic = quantize.PLAIN if interpret else _IN_KERNEL
    dtype = quantize.parameter_dtype(dtype)
    planes = [plane.astype(jnp.float32) for plane in planes]
    low = functools.reduce(jnp.minimum, planes).min()
    high = functools.reduce(jnp.maximum, planes).max()
    low, high = (jnp.broadcast_to(bound, (1,)) for bound in (low, high))
    scale, zero = quantize.parameters(low, high, bits, dtype, arithmetic)
    words = jnp.zeros(planes[0].shape, jnp.int32)
    for plane, values in enumerate(planes):
        words |= quantize.encode(values, scale, zero, bits, arithmetic) << (plane * bits)
    return words.astype(jnp.uint16), pack_pair(scale.astype(dtype), zero.astype(dtype))
