"""The reference of append, in plain jnp, and decoding of a cache.

It is the oracle of the kernels, and the implementation on a CPU.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from mpjax.kernels.batch import Span
from mpjax.kernels.kv_cache import hadamard
from mpjax.kernels.kv_cache import residual as residuals
from mpjax.kernels.kv_cache.cache import KVPages, Side


def encode(x: jax.Array, side: Side) -> tuple[jax.Array, jax.Array | None]:
    """Encodes keys or values x [..., tokens, KV heads, head dim] as one side of the pages.

    Returns words [..., tokens, KV heads, head dim / planes], and the scales and zeros that `encode`
    computes, uint32 pairs: of tokens [..., tokens, KV heads], or of channels [..., groups of
    tokens, KV heads, head dim]; None if it computes none. If channels have scales, the number of
    tokens must be a multiple of `codes.group`.
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
    [words], parameters = codes.encode(pieces, scales, side.parameter_dtype)
    if codes.group is not None:
        words = words.swapaxes(-3, -2).reshape(*x.shape[:-4], -1, x.shape[-3], words.shape[-1])
        return words, jnp.concatenate(parameters, -1)[..., 0, :]
    return words, parameters[0][..., 0] if parameters else None


def append(pages: KVPages, keys: jax.Array, values: jax.Array, span: Span) -> KVPages:
    """`api.append` for pages without a residual and keys [batch, tokens, KV heads, head dim]."""
    tokens = keys.shape[1]
    position = span.starts[:, None] + jnp.arange(tokens)[None]  # [batch, tokens]
    valid = jnp.arange(tokens)[None] < span.counts[:, None]
    return _write(pages, (keys, values), span.block_tables, position, valid)


def flush(pages: KVPages, keys: jax.Array | None, values: jax.Array | None, span: Span) -> KVPages:
    """Encodes the complete blocks of sequences whose new tokens begin a block after them.

    keys, values: the new tokens as in api.append; None if each sequence gets at most one token,
        since complete blocks are then only in the residual.
    span: of the new tokens, a result of `Span.read`.

    Returns the pages with the encoded blocks, and an unchanged residual.
    """
    assert pages.residual is not None
    first_tokens = residuals.first_tokens(span, keys)
    if keys is not None and values is not None:
        keys, values = (x.reshape(-1, *x.shape[-2:]) for x in (keys, values))
    starts, block_tables = span.starts, span.block_tables
    block, capacity = pages.residual.page_size, block_tables.shape[1] * pages.page_size
    lengths = jnp.minimum(starts + span.counts, capacity)
    begins = residuals.begin(jnp.minimum(starts, capacity), block)
    first = residuals.first_block(span, begins)[:, None]
    ahead = jnp.arange(residuals.most_blocks(span.most_tokens, block) * block)
    position = first + ahead[None]  # [batch, tokens]
    full = position < residuals.begin(lengths, block)[:, None]

    def content(residual: jax.Array, new: jax.Array | None) -> jax.Array:
        rows = span.residual_pages
        rows = jnp.arange(len(starts))[:, None] if rows is None else rows
        x = residual[rows, :, position % block]  # [batch, tokens, KV heads, head dim]
        if new is None:
            return x
        token = first_tokens[:, None] + position - starts[:, None]
        is_new = (position >= starts[:, None])[..., None, None]
        return jnp.where(is_new, new[jnp.clip(token, 0, len(new) - 1)].astype(x.dtype), x)

    sides = (pages.residual.keys, keys), (pages.residual.values, values)
    contents = tuple(content(*side) for side in sides)
    written = _write(pages, contents, block_tables, position, full)
    # The residual is written next. That must happen after these reads, or XLA would copy it.
    return jax.lax.optimization_barrier(written)


def _write(
    pages: KVPages,
    contents: tuple[jax.Array, ...],
    block_tables: jax.Array,
    position: jax.Array,
    valid: jax.Array,
) -> KVPages:
    """Encodes keys and values [batch, tokens, KV heads, head dim] and writes the valid ones.

    position: of each token in its sequence, [batch, tokens]. If channels have scales, tokens are
        whole groups.
    valid: whether a token is written, [batch, tokens].
    """
    entry = position // pages.page_size
    entries = block_tables.shape[1]
    page = jnp.take_along_axis(block_tables, jnp.clip(entry, 0, entries - 1), axis=1)
    # Padding gets an index past the end, which the scatter drops.
    page = jnp.where(valid & (entry >= 0) & (entry < entries), page, pages.keys.shape[0])
    slot = position % pages.page_size

    def write(stored: jax.Array, new: jax.Array, tokens: int = 1) -> jax.Array:
        at = stored.at[page[:, ::tokens], :, slot[:, ::tokens] // tokens]
        return at.set(new.astype(stored.dtype), mode="drop")

    def stored(side: Side, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        words, new_parameters = encode(x, side)
        parameters = side.parameters
        if new_parameters is not None:
            parameters = write(side.parameters, new_parameters, side.codes.group or 1)
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
    """Decodes all slots of the pages in block tables, even slots that were never written.

    block_tables: int32 [batch, pages per sequence].
    lengths: int32 [batch], the tokens of each sequence, which determine the residual's content.
    rows: int32 [batch], the page of each sequence in the residual; by default 0, 1, 2 and so on.
        Without a residual, neither lengths nor rows matter.
    transformed: whether keys are returned as stored, after the Hadamard transform.

    Returns keys and values, each float32 [batch, capacity, KV heads, head dim].
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
    in_residual = (position[None] >= residuals.begin(lengths, block)[:, None])[..., None, None]
    rows = jnp.arange(len(lengths)) if rows is None else rows

    def overlaid(x: jax.Array, residual: jax.Array) -> jax.Array:
        residual = residual[rows].swapaxes(1, 2)[:, position % block]
        return jnp.where(in_residual, residual.astype(jnp.float32), x)

    return overlaid(keys, pages.residual.keys), overlaid(values, pages.residual.values)
