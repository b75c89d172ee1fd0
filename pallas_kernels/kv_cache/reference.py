"""What append must do to the cache, and reading a cache back, in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.kv_cache.cache import KVPages, Side
from pallas_kernels.kv_cache.codes import KVCodes


def encode(
    x: jax.Array, codes: KVCodes, parameters: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Words [..., heads, head dim / planes] of x [..., heads, head dim], and parameters.

    parameters: those of the pages, where each head has one. Those of tokens are [..., heads].
    """
    scale = parameters[:, None] if codes.scaling == "head" and parameters is not None else None
    pieces = jnp.split(x, codes.planes, axis=-1)
    [words], of_tokens = codes.encode(pieces, scale, x.dtype)
    return words, None if of_tokens is None else of_tokens[..., 0]


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

    def stored(side: Side, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        words, of_tokens = encode(x, side.codes, side.parameters)
        parameters = side.parameters if of_tokens is None else write(side.parameters, of_tokens)
        return write(side.words, words), parameters

    (key_words, key_parameters), (value_words, value_parameters) = (
        stored(side, x) for side, x in zip(pages.sides, (keys, values), strict=True)
    )
    return KVPages(key_words, value_words, key_parameters, value_parameters, pages.format)


def gather(
    pages: KVPages, block_tables: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Keys and values as float32 [batch, capacity, KV heads, head dim], slots never written too."""

    def read(side: Side) -> jax.Array:
        words, parameters, codes = side
        rows = words[block_tables]  # [batch, pages, KV heads, page size, words]
        if parameters is not None:
            by_token = codes.scaling == "token"
            parameters = (parameters[block_tables] if by_token else parameters[:, None])[..., None]
        x = codes.decode(rows, parameters, dtype).swapaxes(2, 3)
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    keys, values = (read(side) for side in pages.sides)
    return keys, values
