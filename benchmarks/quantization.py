"""Measures the error of attention's result that each KV format's quantisation causes.

python -m benchmarks.quantization

Runs on any machine, because it uses the reference implementation. `mpjax bench attention` measures
the additional error of the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.bench import measure, tables
from mpjax.kernels import (
    KVFormat,
    KVLayout,
    PagedKVCache,
    Span,
    append,
    cache_scales,
    paged_attention,
)

RESULTS = Path(__file__).parent / "results"
FORMATS = ("KV16", "KV8", "KV8s", "KVfp8", "KV4", "KV4t", "KV4c", "K4cV4c", "KV2", "KV2t")
# Kinds of keys: CHANNELS are normal like the rest, ten times as large, or shifted by ten.
KINDS = ("normal", "large channels", "offset channels")
CHANNELS = (7, 40, 101)
TOKENS, KV_HEADS, GROUP, DIM = 4096, 2, 4, 128
COLUMNS: tables.Columns = {
    "format": "{format}",
    **{kind: f"{{errors[{kind}]:.2%}}" for kind in KINDS},
}


def main() -> None:
    """Measures all formats, saves the results in this checkout, and prints the path."""
    rows = list(run(FORMATS, TOKENS))
    print(measure.save("quantization", {"tokens": TOKENS, "results": rows}, RESULTS))


def run(formats: tuple[str, ...], tokens: int) -> Iterator[dict[str, Any]]:
    """Yields a row for each format: its relative error for each kind of keys."""
    scenes = {kind: _scene(kind, tokens) for kind in KINDS}
    for text in formats:
        errors = {kind: _error(KVFormat.parse(text), *scenes[kind]) for kind in KINDS}
        yield {"format": text, "errors": errors}


def _scene(kind: str, tokens: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [heads, dim] of the last token, keys and values [tokens, KV heads, dim]."""
    random = np.random.default_rng(0)
    keys, values = random.standard_normal((2, tokens, KV_HEADS, DIM))
    queries: Any = random.standard_normal((KV_HEADS * GROUP, DIM))
    if kind == "large channels":
        keys[..., CHANNELS] *= 10
    if kind == "offset channels":
        keys[..., CHANNELS] += 10
    queries, keys, values = (jnp.asarray(x, jnp.bfloat16) for x in (queries, keys, values))
    return queries, keys, values


def _error(format: KVFormat, queries: jax.Array, keys: jax.Array, values: jax.Array) -> float:
    """The mean error of attention over a cache, relative to exact attention's mean magnitude."""
    scales = None
    if format.scaling is not None:
        scales = jnp.stack([cache_scales(x, format) for x in (keys, values)])[None]
    cache = PagedKVCache.create(
        KVLayout(KV_HEADS, DIM, format), layers=1, batch=1, max_tokens=len(keys), scales=scales
    )
    start, count = jnp.zeros(1, jnp.int32), jnp.full(1, len(keys), jnp.int32)
    span = Span(cache.block_tables, start, count)
    pages = append(cache.layers[0], keys[None], values[None], span)
    last = Span(cache.block_tables, count - 1, jnp.ones(1, jnp.int32))
    found = paged_attention(queries[None, None], pages, last, implementation="reference")[0, 0]
    expected = _exact(*(np.asarray(x, np.float64) for x in (queries, keys, values)))
    return measure.relative_error(found, expected)


def _exact(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Softmax attention in float64, [heads, dim]."""
    queries = queries.reshape(KV_HEADS, GROUP, DIM)
    scores = np.einsum("hgd,thd->hgt", queries, keys) / np.sqrt(DIM)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    sums = np.einsum("hgt,thd->hgd", weights, values) / weights.sum(-1, keepdims=True)
    return sums.reshape(-1, DIM)


if __name__ == "__main__":
    main()
