"""Paged decode attention over every KV format, beside its floor and cuDNN."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track

from benchmarks import measure
from pallas_kernels import KVFormat, KVPages, PagedKVCache, append, paged_attention
from pallas_kernels.attention.shapes import DECODE, AttentionShape

CHUNK = 1024  # tokens appended at a time
CHECKED_TOKENS = 1 << 16  # caches larger than this are timed, not checked in float64


def main() -> None:
    """Measures every shape and format, and saves `attention.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=measure.RESULTS)
    arguments = parser.parse_args()
    results = []
    for shape in track(DECODE, "shapes"):
        cudnn = _cudnn(shape)
        results += [_format(shape, KVFormat(bits), cudnn) for bits in (16, 8, 4)]
    measure.save("attention", {"results": results}, arguments.output)


def _cudnn(shape: AttentionShape) -> float:
    dims = (shape.batch, shape.context, shape.kv_heads, shape.head_dim)
    query = jnp.ones((shape.batch, 1, shape.query_heads, shape.head_dim), jnp.bfloat16)
    keys, values = (jax.random.normal(jax.random.key(i), dims, jnp.bfloat16) for i in range(2))
    attend = jax.jit(functools.partial(jax.nn.dot_product_attention, implementation="cudnn"))
    return measure.microseconds(attend, query, keys, values)


def _format(shape: AttentionShape, format: KVFormat, cudnn: float) -> dict[str, Any]:
    cache = PagedKVCache.create(
        layers=1,
        batch=shape.batch,
        max_tokens=shape.context,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        format=format,
    )
    pages = cache.layers[0]
    write = jax.jit(append, donate_argnums=0)
    for start in range(0, shape.context, CHUNK):
        dims = (shape.batch, min(CHUNK, shape.context - start), shape.kv_heads, shape.head_dim)
        keys, values = (
            jax.random.normal(jax.random.key(2 * start + i), dims, jnp.bfloat16) for i in range(2)
        )
        starts, counts = (jnp.full(shape.batch, n, jnp.int32) for n in (start, dims[1]))
        pages = write(pages, keys, values, cache.block_tables, starts, counts)
    dims = (shape.batch, 1, shape.query_heads, shape.head_dim)
    query = jax.random.normal(jax.random.key(1), dims, jnp.bfloat16)
    starts = jnp.full(shape.batch, shape.context - 1, jnp.int32)
    arguments = (query, pages, cache.block_tables, starts, jnp.ones_like(starts))
    read = jax.jit(lambda pages: [x.sum(dtype=jnp.float32) for x in jax.tree.leaves(pages)])
    return {
        "shape": shape.name,
        "format": str(format),
        "cache_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(pages)),
        "microseconds": measure.microseconds(jax.jit(paged_attention), *arguments),
        "floor_microseconds": measure.microseconds(read, pages),
        "cudnn_microseconds": cudnn,
        "relative_error": _error(shape, arguments),
    }


def _error(
    shape: AttentionShape,
    arguments: tuple[jax.Array, KVPages, jax.Array, jax.Array, jax.Array],
) -> float | None:
    """Mean error over mean magnitude, against the float32 reference over the same cache."""
    if shape.batch * shape.context > CHECKED_TOKENS:
        return None
    found = np.asarray(jax.jit(paged_attention)(*arguments), np.float64)
    query, *rest = arguments
    reference = functools.partial(paged_attention, implementation="reference")
    exact = np.asarray(jax.jit(reference)(query, *rest), np.float64)
    return float(np.abs(found - exact).mean() / np.abs(exact).mean())


if __name__ == "__main__":
    main()
