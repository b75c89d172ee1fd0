"""What append must do to the cache, and reading a cache back, in plain jnp."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from mpjax.kernels.batch import Span
from mpjax.kernels.kv_cache import hadamard
from mpjax.kernels.kv_cache import residual as residuals
from mpjax.kernels.kv_cache.cache import KVPages, Side


def encode(x: jax.Array, side: Side) -> tuple[jax.Array, jax.Array | None]:
    """Words, and the parameters that aren't given, of x [..., tokens, heads, head dim].

    Words are [..., tokens, heads, head dim / planes]; parameters of tokens [..., tokens, heads],
    and those of channels [..., groups, heads, head dim] for groups of so many tokens.
    """
    codes, scales = side.codes, None
    if codes.has_given_scales:
        given = side.parameters.reshape(len(side.parameters), -1)  # [heads, 1 or dim]
        wide = jnp.broadcast_to(given, (len(given), x.shape[-1]))
        wide = jax.lax.broadcast_to_rank(wide, x.ndim)
        scales = jnp.split(wide, codes.planes, axis=-1)
    if codes.hadamard:
        [transformed] = hadamard.transform_pieces([x], x.shape[-1], x.dtype)
        x = transformed.astype(x.dtype)
    if codes.group is not None:
        x = x.reshape(*x.shape[:-3], -1, codes.group, *x.shape[-2:]).swapaxes(-3, -2)
    pieces = jnp.split(x, codes.planes, axis=-1)
    [words], found = codes.encode(pieces, scales, side.parameter_dtype)
    if codes.group is not None:
        words = words.swapaxes(-3, -2).reshape(*x.shape[:-4], -1, x.shape[-3], words.shape[-1])
        return words, jnp.concatenate(found, -1)[..., 0, :]
    return words, found[0][..., 0] if found else None


def append(pages: KVPages, keys: jax.Array, values: jax.Array, span: Span) -> KVPages:
    """See api.append; pages without a residual, and tokens of a batch."""
    tokens = keys.shape[1]
    position = span.starts[:, None] + jnp.arange(tokens)[None]  # [batch, tokens]
    valid = jnp.arange(tokens)[None] < span.counts[:, None]
    return _write(pages, (keys, values), span.block_tables, position, valid)


def flush(pages: KVPages, keys: jax.Array | None, values: jax.Array | None, span: Span) -> KVPages:
    """Encodes the blocks that are complete when new tokens begin one behind them.

    keys, values: the new tokens as api.append takes them; or None, where each sequence gets one at
        most.
    span: one that has been read, so that its `longest` is known.

    The residual stays as it is.
    """
    assert pages.residual is not None
    first_tokens = residuals.first_tokens(span, keys)
    if keys is not None and values is not None:
        keys, values = (x.reshape(-1, *x.shape[-2:]) for x in (keys, values))
    starts, block_tables = span.starts, span.block_tables
    block, capacity = pages.residual.page_size, block_tables.shape[1] * pages.page_size
    lengths = jnp.minimum(starts + span.counts, capacity)
    first = residuals.begin(jnp.minimum(starts, capacity), block)[:, None]
    ahead = jnp.arange(residuals.most_blocks(span.most_tokens, block) * block)
    position = first + ahead[None]  # [batch, tokens]
    full = position < residuals.begin(lengths, block)[:, None]

    def content(waiting: jax.Array, new: jax.Array | None) -> jax.Array:
        rows = jnp.arange(len(starts))[:, None]
        x = waiting[rows, :, position % block]  # [batch, tokens, KV heads, head dim]
        if new is None:
            return x
        token = first_tokens[:, None] + position - starts[:, None]
        is_new = (position >= starts[:, None])[..., None, None]
        return jnp.where(is_new, new[jnp.clip(token, 0, len(new) - 1)].astype(x.dtype), x)

    sides = (pages.residual.keys, keys), (pages.residual.values, values)
    contents = tuple(content(*side) for side in sides)
    written = _write(pages, contents, block_tables, position, full)
    # What is written to the residual next must come after this has read it, or XLA copies it.
    return jax.lax.optimization_barrier(written)


def _write(
    pages: KVPages,
    contents: tuple[jax.Array, ...],
    block_tables: jax.Array,
    position: jax.Array,
    valid: jax.Array,
) -> KVPages:
    """Encodes keys and values [batch, tokens, KV heads, head dim] and writes the valid ones.

    position, valid: [batch, tokens]; where channels have scales, of whole groups of tokens.
    """
    entry = position // pages.page_size
    entries = block_tables.shape[1]
    page = jnp.take_along_axis(block_tables, jnp.clip(entry, 0, entries - 1), axis=1)
    # An index past the end is dropped by the scatter: nothing is written for padding.
    page = jnp.where(valid & (entry >= 0) & (entry < entries), page, pages.keys.shape[0])
    slot = position % pages.page_size

    def write(stored: jax.Array, new: jax.Array, tokens: int = 1) -> jax.Array:
        at = stored.at[page[:, ::tokens], :, slot[:, ::tokens] // tokens]
        return at.set(new.astype(stored.dtype), mode="drop")

    def stored(side: Side, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        words, found = encode(x, side)
        parameters = side.parameters
        if found is not None:
            parameters = write(side.parameters, found, side.codes.group or 1)
        return write(side.words, words), parameters

    (key_words, key_parameters), (value_words, value_parameters) = (
        stored(side, x) for side, x in zip(pages.sides, contents, strict=True)
    )
    return dataclasses.replace(
        pages,
        keys=key_words,
        values=value_words,
        key_parameters=key_parameters,
        value_parameters=value_parameters,
    )


def gather(
    pages: KVPages,
    block_tables: jax.Array,
    lengths: jax.Array | None = None,
    rows: jax.Array | None = None,
    *,
    transformed: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Keys and values as float32 [batch, capacity, KV heads, head dim], slots never written too.

    lengths: of the sequences, which say what waits in the residual; rows: which sequences they are,
        where not all in order. Neither matters to pages without a residual.
    transformed: keys as they are stored, where that is after a Hadamard transform.
    """

    def read(side: Side) -> jax.Array:
        words, parameters, codes, dtype = side
        stored = words[block_tables]  # [batch, pages, KV heads, page size, words]
        if parameters is not None:
            if codes.has_given_scales:
                parameters = parameters.reshape(1, 1, len(parameters), 1, -1)
            elif codes.scaling == "token":
                parameters = parameters[block_tables][..., None]
            elif codes.group is not None:
                parameters = jnp.repeat(parameters[block_tables], codes.group, axis=3)
        x = codes.decode(stored, parameters, dtype).swapaxes(2, 3)
        if codes.hadamard and not transformed:
            x = hadamard.transform(x)  # its own inverse
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    keys, values = (read(side) for side in pages.sides)
    if pages.residual is None:
        return keys, values
    if lengths is None:
        raise ValueError("gather: pages with a residual need the lengths of the sequences")
    block, position = pages.residual.page_size, jnp.arange(keys.shape[1])
    lengths = jnp.minimum(lengths, keys.shape[1])
    waits = (position[None] >= residuals.begin(lengths, block)[:, None])[..., None, None]
    rows = jnp.arange(len(lengths)) if rows is None else rows

    def overlaid(x: jax.Array, waiting: jax.Array) -> jax.Array:
        waiting = waiting[rows].swapaxes(1, 2)[:, position % block]
        return jnp.where(waits, waiting.astype(jnp.float32), x)

    return overlaid(keys, pages.residual.keys), overlaid(values, pages.residual.values)
