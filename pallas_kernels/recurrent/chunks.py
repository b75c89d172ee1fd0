"""Runs recurrences over ragged batches of tokens, one chunk of a sequence after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.kernels.kv_cache.varlen import tokens_of

CHUNK = 64  # the most tokens of a chunk; a power of two
Tokens = Any  # a tree of arrays [batch, tokens, ...], or varlen [tokens, ...]
# A function of states [batch, ...] and chunks [batch, C, ...] that returns the states after them,
# and outputs [batch, C, ...]. C is a power of two. Zero tokens leave a state unchanged.
ReadChunk = Callable[[jax.Array, Tokens], tuple[jax.Array, jax.Array]]


def read_in_chunks(
    read: ReadChunk,
    state: jax.Array,
    tokens: Tokens,
    counts: jax.Array | None,
    places: tuple[int, ...],
) -> tuple[jax.Array, jax.Array]:
    """The states [batch, ...] after tokens, and the tokens' outputs, in the tokens' layout.

    counts: int32 [batch], the real tokens of each sequence; None: all padded tokens. Other tokens
    are zeroed first, and their outputs are undefined.
    places: (batch, tokens) of padded tokens, (tokens,) of varlen tokens.
    """
    size = 1
    while size < min(places[-1], CHUNK):
        size *= 2
    if len(places) == 1:
        assert counts is not None
        return _varlen(read, state, tokens, counts, size)
    if counts is not None:
        tokens = _keep(tokens, jnp.arange(places[1])[None] < counts[:, None])
    return _padded(read, state, tokens, places, size)


# A function of tokens [tokens], states, and sequences' begins and counts, int32 [batch], that
# returns outputs and states.
ReadFlat = Callable[[Tokens, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def read_flat(
    read: ReadFlat,
    state: jax.Array,
    tokens: Tokens,
    counts: jax.Array | None,
    places: tuple[int, ...],
) -> tuple[jax.Array, jax.Array]:
    """As `read_in_chunks`, by a kernel for all sequences, concatenated in one array.

    The kernel needs no zeros as padding, and doesn't write padding's outputs.
    """
    *batch, length = places
    if batch:
        begins = jnp.arange(batch[0], dtype=jnp.int32) * length
        tokens = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tokens)
        own = jnp.full(batch, length, jnp.int32) if counts is None else counts
    else:
        assert counts is not None
        begins, own = jnp.cumsum(counts) - counts, counts
    outputs, state = read(tokens, state, begins, own)
    outputs = outputs.reshape(*places, *outputs.shape[1:])
    if counts is None:
        return state, outputs
    token = jnp.arange(length)
    is_real = token[None] < counts[:, None] if batch else token < counts.sum()
    return state, _keep(outputs, is_real)


def _padded(
    read: ReadChunk, state: jax.Array, tokens: Tokens, places: tuple[int, ...], size: int
) -> tuple[jax.Array, jax.Array]:
    batch, length = places
    chunks = -(-length // size)

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, chunks * size - length), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(x.reshape(batch, chunks, size, *x.shape[2:]), 1, 0)

    # For gradients, chunks are recomputed instead of storing their intermediate values.
    state, outputs = jax.lax.scan(jax.checkpoint(read), state, jax.tree.map(split, tokens))
    outputs = jnp.moveaxis(outputs, 0, 1)
    return state, outputs.reshape(batch, chunks * size, *outputs.shape[3:])[:, :length]


def _varlen(
    read: ReadChunk, state: jax.Array, tokens: Tokens, counts: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
    """For varlen tokens: each sequence begins a chunk; sequences of one token share one chunk."""
    length, batch = len(jax.tree.leaves(tokens)[0]), len(counts)
    begins = jnp.cumsum(counts) - counts
    padded = jax.tree.map(lambda x: jnp.pad(x, [(0, size), *[(0, 0)] * (x.ndim - 1)]), tokens)
    # The single tokens of all sequences; sequences with several tokens get zeros and keep states.
    first = jnp.minimum(begins, length)
    singles = _keep(jax.tree.map(lambda x: x[first][:, None], padded), (counts == 1)[:, None])
    state, single = read(state, singles)
    needed = jnp.where(counts > 1, -(-counts // size), 0)
    most = length // size + min(batch, length // 2)
    found = tokens_of(needed, most)
    outputs = jnp.zeros((length + size, *single.shape[2:]), single.dtype)

    def advance(
        carry: tuple[jax.Array, jax.Array], number: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        sequence, passed = found.sequence[number], found.number[number] * size
        begin = begins[sequence] + passed

        def run(state: jax.Array, outputs: jax.Array) -> tuple[jax.Array, jax.Array]:
            chunk = jax.tree.map(
                lambda x: jax.lax.dynamic_slice_in_dim(x, begin, size)[None], padded
            )
            chunk = _keep(chunk, (jnp.arange(size) < counts[sequence] - passed)[None])
            after, new = read(state[sequence][None], chunk)
            # Outputs beyond the sequence's end are the next sequence's, which are written later.
            outputs = jax.lax.dynamic_update_slice_in_dim(outputs, new[0], begin, 0)
            return state.at[sequence].set(after[0]), outputs

        return jax.lax.cond(found.is_real[number], run, lambda *carry: carry, *carry), None

    if most:
        carry = state, outputs
        (state, outputs), _ = jax.lax.scan(jax.checkpoint(advance), carry, jnp.arange(most))
    at = jnp.where(counts == 1, first, len(outputs))
    return state, outputs.at[at].set(single[:, 0], mode="drop")[:length]


def _keep(tokens: Tokens, is_real: jax.Array) -> Tokens:
    """The tokens with zeros instead of padding. is_real: bool, of the arrays' first axes."""

    def clear(x: jax.Array) -> jax.Array:
        return jnp.where(jax.lax.expand_dims(is_real, range(is_real.ndim, x.ndim)), x, 0)

    return jax.tree.map(clear, tokens)
