"""Caches with something in them, queries, and what attention over them must give."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import KVFormat, KVPages
from tests.pallas_kernels.oracles import (
    NUMPY_DTYPES,
    as_array,
    kv_encoded,
    kv_words,
    parameter_words,
    relative_error,
    softmax_attention,
)


@dataclasses.dataclass(frozen=True)
class Scene:
    """Arguments of paged_attention, and the keys and values that the pages decode to."""

    queries: jax.Array
    pages: KVPages
    block_tables: jax.Array
    starts: jax.Array
    counts: jax.Array
    keys: np.ndarray  # float64 [batch, capacity, KV heads, head dim]
    values: np.ndarray

    @property
    def arguments(self) -> tuple:
        return self.queries, self.pages, self.block_tables, self.starts, self.counts

    def error(self, out: jax.Array, scale: float | None = None, window: int | None = None) -> float:
        """mean|Δ| / mean|reference| over the real rows; infinite where any row is no number."""
        assert out.shape == self.queries.shape
        assert out.dtype == self.queries.dtype
        if not np.isfinite(np.asarray(out).astype(np.float32)).all():
            return np.inf
        starts, counts = np.asarray(self.starts), np.asarray(self.counts)
        tokens = np.arange(self.queries.shape[1])
        expected = softmax_attention(
            np.asarray(self.queries).astype(np.float64),
            self.keys,
            self.values,
            starts[:, None] + tokens,
            starts + counts,
            self.queries.shape[3] ** -0.5 if scale is None else scale,
            window,
        )
        real = tokens < counts[:, None]
        return relative_error(np.asarray(out)[real], expected[real])


def scene(
    rng: np.random.Generator,
    text: str,
    dtype: str,
    *,
    starts: list[int],
    counts: list[int],
    heads: tuple[int, int] = (2, 2),
    head_dim: int = 64,
    page_size: int = 64,
    kind: str = "normal",
) -> Scene:
    """heads: KV heads, and query heads for each. Slots past the lengths hold other numbers.

    kind: `normal`; `outlier`, with a channel 50 times as strong as the rest; `uniform`, with
    queries so weak that all keys weigh nearly the same, and the result is a small difference of
    large sums; `small`, with values around a thousandth.
    """
    kv_heads, group = heads
    batch, tokens = len(starts), max(max(counts), 1)
    entries = -(-max(s + c for s, c in zip(starts, counts, strict=True)) // page_size) or 1
    shape = (batch * entries + 1, kv_heads, page_size, head_dim)
    queries = rng.standard_normal((batch, tokens, kv_heads * group, head_dim))
    keys, values = rng.standard_normal((2, *shape))
    if kind == "outlier":
        keys[..., 7] *= 50
        values[..., 11] *= 50
    if kind == "uniform":
        queries *= 0.01
    if kind == "small":
        values *= 1e-3
    format = KVFormat.parse(text)
    (key_pages, key_parameters, keys), (value_pages, value_parameters, values) = (
        _stored(x.astype(NUMPY_DTYPES.get(dtype, dtype)), format) for x in (keys, values)
    )
    block_tables = rng.permutation(shape[0])[: batch * entries].reshape(batch, entries)

    def gathered(x: np.ndarray) -> np.ndarray:
        return x[block_tables].swapaxes(2, 3).reshape(batch, -1, kv_heads, head_dim)

    return Scene(
        as_array(queries, dtype),
        KVPages(key_pages, value_pages, key_parameters, value_parameters, format),
        jnp.asarray(block_tables.astype(np.int32)),
        jnp.asarray(np.array(starts, np.int32)),
        jnp.asarray(np.array(counts, np.int32)),
        gathered(keys),
        gathered(values),
    )


def _stored(x: np.ndarray, format: KVFormat) -> tuple[jax.Array, jax.Array | None, np.ndarray]:
    """Words, parameters and what they decode to in float64."""
    if not format.is_quantized:
        return jnp.asarray(x), None, x.astype(np.float64)
    codes, scale, zero = kv_encoded(x, format.bits)
    decoded = codes * scale.astype(np.float64)[..., None] + zero.astype(np.float64)[..., None]
    words = jnp.asarray(kv_words(codes, format.bits))
    return words, jnp.asarray(parameter_words(scale, zero)), decoded
