"""Caches with something in them, queries, what attention over them must give, and the kernel."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels import KVFormat, KVPages, Masks, Span
from mpjax.kernels.attention import triton
from mpjax.kernels.attention.plans import Problem, rule
from mpjax.kernels.kv_cache import hadamard
from tests.pallas_kernels.kv_cache.pages import parameter_dtype
from tests.pallas_kernels.oracles import (
    NUMPY_DTYPES,
    KVSide,
    as_array,
    kv_keys,
    kv_values,
    relative_error,
    softmax_attention,
)

# Every sequence at once: empty, one key, full pages, one key more, the middle of a page.
DECODE: dict[str, Any] = {"starts": [0, 0, 63, 64, 200], "counts": [0, 1, 1, 1, 1]}
# A prompt, its continuation across a page boundary, a short one with padding, nothing.
CHUNKS: dict[str, Any] = {"starts": [0, 50, 129, 7], "counts": [20, 20, 3, 0]}


@functools.partial(
    jax.jit,
    static_argnames=(
        "splits",
        "residual_splits",
        "is_balanced",
        "window",
        "softcap",
        "scale",
        "interpret",
    ),
)
def kernel(
    queries,
    pages,
    span,
    *,
    splits,
    residual_splits=None,
    is_balanced=False,
    window=None,
    softcap=None,
    sinks=None,
    scale=None,
    interpret=True,
):
    """The kernel with the configuration that it would have, or as many splits as are asked for.

    residual_splits: programs for the residual, or None for as many as it would have.
    is_balanced: whether programs help each other, whatever the lengths.
    """
    _, tokens, heads, _ = queries.shape
    if pages.format.key_codes.hadamard:
        queries = hadamard.transform(queries)
    rows = tokens * heads // pages.keys.shape[1]
    # So that it has the registers, too, that it would have.
    tokens = 0 if is_balanced else 1 << 30
    long = dict.fromkeys(["LONG_SEQUENCE", "LONG_TOKENS"], tokens)
    with mock.patch.multiple(rule, **long):
        config = rule.config_by_rule(Problem.of(rows, pages, span.block_tables.shape))
    assert config.is_balanced == is_balanced
    config = dataclasses.replace(config, splits=splits or config.splits)
    if residual_splits is not None:
        config = dataclasses.replace(config, residual_splits=residual_splits)
    masks = Masks(scale, window, softcap, sinks)
    span = span.read("kernel", queries.shape[:-2])
    return triton.paged_attention(queries, pages, span, masks, config, interpret=interpret)


@dataclasses.dataclass(frozen=True)
class Scene:
    """Arguments of paged_attention, and the keys and values that the pages decode to."""

    queries: jax.Array
    pages: KVPages
    span: Span
    keys: np.ndarray  # float64 [batch, capacity, KV heads, head dim]
    values: np.ndarray

    @property
    def arguments(self) -> tuple:
        return self.queries, self.pages, self.span

    def varlen_queries(self, padding: int = 0) -> jax.Array:
        """The queries of sequences one after another, and zeros after all."""
        rows = [
            np.asarray(x)[:count] for x, count in zip(self.queries, self.span.counts, strict=True)
        ]
        zeros = np.zeros((padding, *rows[0].shape[1:]), rows[0].dtype)
        return jnp.asarray(np.concatenate([*rows, zeros]))

    def padded(self, out: jax.Array) -> jax.Array:
        """The inverse for outputs, with zeros for padding."""
        result, counts = np.zeros(self.queries.shape, out.dtype), np.asarray(self.span.counts)
        for row, count, end in zip(result, counts, np.cumsum(counts), strict=True):
            row[:count] = np.asarray(out)[end - count : end]
        return jnp.asarray(result)

    def alone(self, row: int) -> Scene:
        """One sequence of the batch."""
        fields = {n: getattr(self, n)[row : row + 1] for n in ("queries", "keys", "values")}
        span = jax.tree.map(lambda x: x[row : row + 1], self.span)
        return dataclasses.replace(self, **fields, span=span)

    def moved(self, **arrays: Any) -> Scene:
        """With other starts, counts or block tables."""
        return dataclasses.replace(self, span=dataclasses.replace(self.span, **arrays))

    def error(self, out: jax.Array, scale: float | None = None, **masks: Any) -> float:
        """mean|Δ| / mean|reference| over the real rows; infinite where any row is no number.

        masks: the window, softcap and sinks that `out` was computed with.
        """
        assert out.shape == self.queries.shape
        assert out.dtype == self.queries.dtype
        if not np.isfinite(np.asarray(out).astype(np.float32)).all():
            return np.inf
        starts, counts = np.asarray(self.span.starts), np.asarray(self.span.counts)
        tokens = np.arange(self.queries.shape[1])
        expected = softmax_attention(
            np.asarray(self.queries).astype(np.float64),
            self.keys,
            self.values,
            starts[:, None] + tokens,
            starts + counts,
            self.queries.shape[3] ** -0.5 if scale is None else scale,
            **masks,
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

    page_size: or what the format needs at least.

    kind: `normal`; `outlier`, with a channel 50 times as strong as the rest; `uniform`, with
    queries so weak that all keys weigh nearly the same, and the result is a small difference of
    large sums; `small`, with values around a thousandth; `positive`, with such values of
    one sign; `near`, with values a thousandth from one; `flat`, with small keys, of which some
    channels are all alike, and queries that are large just there; `alike`, with values of which
    each token's are; `cancelling`, with queries of ones and keys hundreds in size whose sums are
    not; `null`, with positive values but for a token of zeros on each page, which
    outweighs every other 256 times.
    """
    kv_heads, group = heads
    format = KVFormat.parse(text)
    page_size = max(page_size, format.group or 1)
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
    if kind == "positive":
        values = 1e-3 + 3e-4 * values
    if kind == "near":
        values = 1 + 1e-3 * values
    if kind == "flat":
        keys *= 0.01
        keys[..., 8:16] = 0
        queries[..., 8:16] *= 5
    if kind == "alike":
        values = np.broadcast_to(values[..., :1] * 1e-2, shape)
    if kind == "cancelling":
        queries, keys = np.ones_like(queries), 500 * np.sign(keys)
        keys[..., 1::2] = -0.999 * keys[..., ::2]
    if kind == "null":
        values = 1e-3 + 3e-4 * values
        values[:, :, 0], keys[:, :, 1:] = 0, 0
        queries, keys[:, :, 0] = np.ones_like(queries), 8 * np.log(2) / head_dim**0.5
    scales = rng.uniform(0.05, 0.2, (2, kv_heads, 1)).astype(np.float32)
    if format.scaling == "static":  # of channels, whatever they reach
        scales = np.abs(np.stack([keys, values])).max((1, 3)).astype(np.float32) / 127
    residual = None
    if format.block is not None:  # what waits has nothing to do with what is packed in its place
        waiting = rng.standard_normal((2, batch, kv_heads, format.block, head_dim))
        waiting *= np.abs(np.stack([keys, values])).max((1, 2, 3))[:, None, None, None] / 4
        waiting = waiting.astype(NUMPY_DTYPES.get(dtype, dtype))
        residual = KVPages(jnp.asarray(waiting[0]), jnp.asarray(waiting[1]), None, None, KVFormat())
    (key_pages, key_parameters, keys), (value_pages, value_parameters, values) = (
        _stored(side, x.astype(NUMPY_DTYPES.get(dtype, dtype)), str(kind), scale)
        for side, x, kind, scale in zip(
            (kv_keys, kv_values), (keys, values), (format.keys, format.values), scales, strict=True
        )
    )
    block_tables = rng.permutation(shape[0])[: batch * entries].reshape(batch, entries)

    def gathered(x: np.ndarray, side: int) -> np.ndarray:
        x = x[block_tables].swapaxes(2, 3).reshape(batch, -1, kv_heads, head_dim)
        if format.block is None:
            return x
        for b, length in enumerate(np.add(starts, counts)):
            begin = max(length - 1, 0) // format.block * format.block
            x[b, begin:length] = waiting[side, b].swapaxes(0, 1)[: length - begin]
        return x

    return Scene(
        as_array(queries, dtype),
        KVPages(
            *(key_pages, value_pages, key_parameters, value_parameters),
            format,
            residual,
            parameter_dtype(format, dtype),
        ),
        Span(*(jnp.asarray(np.asarray(x, np.int32)) for x in (block_tables, starts, counts))),
        gathered(keys, 0),
        gathered(values, 1),
    )


def _stored(
    stored: Callable[..., KVSide], x: np.ndarray, kind: str, scale: np.ndarray
) -> tuple[jax.Array, jax.Array | None, np.ndarray]:
    """Words, parameters and what they decode to in float64."""
    side = stored(x, kind, scale[:, None])
    parameters = {"fp8": scale[:, 0], "8s": scale}.get(kind, side.parameters)
    return (
        jnp.asarray(side.words),
        None if parameters is None else jnp.asarray(parameters),
        side.decoded,
    )


def sinks_of(rng: np.random.Generator, heads: int) -> jax.Array:
    """Sinks from negligible ones to such as leave hardly any weight to keys."""
    return jnp.asarray(rng.uniform(-3, 9, heads).astype(np.float32))
