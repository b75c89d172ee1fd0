"""Fills KV pages with random keys and values, to measure long contexts without a prefill."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mpjax.kernels import KVPages, Span, append

APPENDED_TOKENS = 1024  # tokens of each sequence in one append


@functools.partial(jax.jit, donate_argnames="pages", static_argnames="mesh")
def fill(
    pages: KVPages,
    block_tables: jax.Array,
    tokens: jax.Array | int,
    seed: jax.Array | int,
    mesh: jax.sharding.Mesh | None = None,
) -> KVPages:
    """Appends normally distributed keys and values to each sequence of a layer's empty pages.

    block_tables: int32 [batch, pages per sequence].
    tokens: the number of tokens of each sequence, an int or int32 [batch]. Tokens beyond the end of
        a block table are not written.
    mesh: the devices among which the KV heads are divided; all devices get the same values.

    The pages are donated and written in place.
    """
    if mesh is None:
        return _fill_pages(pages, block_tables, tokens, seed)
    divided, whole = PartitionSpec(*mesh.axis_names), PartitionSpec()
    return jax.shard_map(
        _fill_pages,
        mesh=mesh,
        in_specs=(divided, whole, whole, whole),
        out_specs=divided,
        check_vma=False,
    )(pages, block_tables, jnp.asarray(tokens, jnp.int32), jnp.asarray(seed, jnp.int32))


def _fill_pages(
    pages: KVPages, block_tables: jax.Array, tokens: jax.Array | int, seed: jax.Array | int
) -> KVPages:
    batch, entries = block_tables.shape
    at_once = min(APPENDED_TOKENS, entries * pages.page_size)
    heads, dims = pages.keys.shape[1], (pages.head_dim, pages.value_dim)
    key = jax.random.key(seed)
    lengths = jnp.broadcast_to(jnp.asarray(tokens, jnp.int32), (batch,))

    def write(piece: jax.Array, pages: KVPages) -> KVPages:
        start = piece * at_once
        keys, values = (
            jax.random.normal(part, (batch, at_once, heads, dim), jnp.bfloat16)
            for part, dim in zip(
                jax.random.split(jax.random.fold_in(key, piece)), dims, strict=True
            )
        )
        starts = jnp.full(batch, start, jnp.int32)
        counts = jnp.clip(lengths - start, 0, at_once)
        return append(pages, keys, values, Span(block_tables, starts, counts))

    pieces = (lengths.max() + at_once - 1) // at_once
    return jax.lax.fori_loop(0, pieces, write, pages)
