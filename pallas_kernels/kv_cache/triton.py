"""The append kernel: quantises new keys and values and writes them into their pages, in place."""

from __future__ import annotations

import functools
from typing import Any

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
    tokens, page_size = keys_ref.shape[1], outputs[0].shape[2]
    batch, token = pl.program_id(0) // tokens, pl.program_id(0) % tokens
    head = pl.program_id(1)
    position = backend.load(starts_ref.at[batch]) + token
    entry = position // page_size
    entries = block_tables_ref.shape[1]
    valid = (token < backend.load(counts_ref.at[batch])) & (entry < entries)
    page = backend.load(block_tables_ref.at[batch, jnp.minimum(entry, entries - 1)])
    slot = position % page_size
    width = outputs[0].shape[3]
    lane = jnp.arange(width)
    mask = jnp.broadcast_to(valid, (width,))
    for source, index in ((keys_ref, 0), (values_ref, 1)):
        planes = [
            backend.load(source.at[batch, token, head, plane * width + lane])
            for plane in range(format.planes)
        ]
        target = outputs[index].at[page, head, slot, lane]
        if not format.is_quantized:
            backend.store(target, planes[0].astype(outputs[index].dtype), mask=mask)
            continue
        words, parameters = _encode(planes, format.bits, interpret)
        backend.store(target, words, mask=mask)
        target = outputs[2 + index].at[page, head, slot + jnp.arange(1)]
        backend.store(target, parameters, mask=jnp.broadcast_to(valid, (1,)))


def _encode(planes: list[jax.Array], bits: int, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """Words [width] and parameters [1] of one head."""
    arithmetic = quantize.PLAIN if interpret else _IN_KERNEL
    dtype = quantize.parameter_dtype(planes[0].dtype)
    planes = [plane.astype(jnp.float32) for plane in planes]
    low = functools.reduce(jnp.minimum, planes).min()
    high = functools.reduce(jnp.maximum, planes).max()
    low, high = (jnp.broadcast_to(bound, (1,)) for bound in (low, high))
    scale, zero = quantize.parameters(low, high, bits, dtype, arithmetic)
    words = jnp.zeros(planes[0].shape, jnp.int32)
    for plane, values in enumerate(planes):
        words |= quantize.encode(values, scale, zero, bits, arithmetic) << (plane * bits)
    return words.astype(jnp.uint16), pack_pair(scale.astype(dtype), zero.astype(dtype))
