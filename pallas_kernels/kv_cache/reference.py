"""What append must do to the cache, and reading a cache back, in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import bits as bit_planes
from pallas_kernels.kv_cache import quantize
from pallas_kernels.kv_cache.cache import KVFormat, KVPages


def encode(x: jax.Array, format: KVFormat) -> tuple[jax.Array, jax.Array | None]:
    """Words [..., head dim / planes] and parameters [...] of x [..., head dim]."""
    if not format.is_quantized:
        return x, None
    values = x.astype(jnp.float32)
    dtype = quantize.parameter_dtype(x.dtype)
    low, high = values.min(-1), values.max(-1)
    scale, zero = quantize.parameters(low, high, format.bits, dtype)
    codes = quantize.encode(values, scale[..., None], zero[..., None], format.bits)
    planes = codes.reshape(*x.shape[:-1], format.planes, x.shape[-1] // format.planes)
    return bit_planes.pack_planes(planes, format.bits), bit_planes.pack_pair(
        scale.astype(dtype), zero.astype(dtype)
    )


def decode(
    words: jax.Array, parameters: jax.Array | None, format: KVFormat, dtype: jnp.dtype
) -> jax.Array:
    """Values [..., head dim] in float32; dtype is that of the values that were encoded."""
    if parameters is None:
        return words.astype(jnp.float32)
    codes = bit_planes.unpack_planes(words, format.bits)
    codes = codes.reshape(*words.shape[:-1], -1).astype(jnp.float32)
    half = quantize.parameter_dtype(dtype)
    scale, zero = bit_planes.unpack_pair(parameters, half, half)
    return codes * scale.astype(jnp.float32)[..., None] + zero.astype(jnp.float32)[..., None]


def append(
    pages: KVPages,
    keys: jax.Array,
    values: jax.Array,
    block_tables: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
) -> KVPages:
    """See api.append."""
    tokens = keys.shape[1]
    position = starts[:, None] + jnp.arange(tokens)  # [batch, tokens]
    entry = position // pages.page_size
    page = jnp.take_along_axis(block_tables, jnp.minimum(entry, block_tables.shape[1] - 1), axis=1)
    valid = (jnp.arange(tokens) < counts[:, None]) & (entry < block_tables.shape[1])
    # An index past the end is dropped by the scatter: nothing is written for padding.
    page = jnp.where(valid, page, pages.keys.shape[0])
    slot = position % pages.page_size

    def write(stored: jax.Array, new: jax.Array) -> jax.Array:
        return stored.at[page, :, slot].set(new.astype(stored.dtype), mode="drop")

    key_words, key_parameters = encode(keys, pages.format)
    value_words, value_parameters = encode(values, pages.format)
    new = KVPages(key_words, value_words, key_parameters, value_parameters, pages.format)
    return jax.tree.map(write, pages, new)


def gather(
    pages: KVPages, block_tables: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Keys and values as float32 [batch, capacity, KV heads, head dim], slots never written too."""

    def read(words: jax.Array, parameters: jax.Array | None) -> jax.Array:
        rows = words[block_tables]  # [batch, pages, KV heads, page size, words]
        chosen = None if parameters is None else parameters[block_tables]
        x = decode(rows, chosen, pages.format, dtype).swapaxes(2, 3)
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    return (
        read(pages.keys, pages.key_parameters),
        read(pages.values, pages.value_parameters),
    )
