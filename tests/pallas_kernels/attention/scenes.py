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
from tests.pallas_kernels.attention.kinds import KINDS
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
        "chunked",
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
    chunked=False,
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
    masks = Masks(scale, window, softcap, sinks, chunked)
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

        masks: the window, softcap, sinks and chunks that `out` was computed with.
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
    kind: one of KINDS.
    """
    kv_heads, group = heads
    format = KVFormat.parse(text)
    page_size = max(page_size, format.group or 1)
    batch, tokens = len(starts), max(max(counts), 1)
    entries = -(-max(s + c for s, c in zip(starts, counts, strict=True)) // page_size) or 1
    shape = (batch * entries + 1, kv_heads, page_size, head_dim)
    queries = rng.standard_normal((batch, tokens, kv_heads * group, head_dim))
    keys, values = rng.standard_normal((2, *shape))
    queries, keys, values = KINDS[kind](queries, keys, values)
    scales = rng.uniform(0.05, 0.2, (2, kv_heads, 1)).astype(np.float32)
    if format.scaling == "static":  # of channels, whatever they reach
        scales = np.abs(np.stack([keys, values])).max((1, 3)).astype(np.float32) / 127
    residual, waiting = None, None
    if format.block is not None:
        waiting = _waiting(rng, np.stack([keys, values]), (batch, format.block), dtype)
        residual = KVPages(jnp.asarray(waiting[0]), jnp.asarray(waiting[1]), None, None, KVFormat())
    (key_pages, key_parameters, keys), (value_pages, value_parameters, values) = (
        _stored(side, x.astype(NUMPY_DTYPES.get(dtype, dtype)), str(kind), scale)
        for side, x, kind, scale in zip(
            (kv_keys, kv_values), (keys, values), (format.keys, format.values), scales, strict=True
        )
    )
    block_tables = rng.permutation(shape[0])[: batch * entries].reshape(batch, entries)

    decoded = [x[block_tables].swapaxes(2, 3) for x in (keys, values)]
    decoded = [x.reshape(batch, -1, kv_heads, head_dim) for x in decoded]
    if waiting is not None:
        for b, length in enumerate(np.add(starts, counts)):
            begin = max(length - 1, 0) // format.block * format.block
            for x, tokens_of in zip(decoded, waiting[:, b].swapaxes(1, 2), strict=True):
                x[b, begin:length] = tokens_of[: length - begin]
    return Scene(
        as_array(queries, dtype),
        KVPages(
            *(key_pages, value_pages, key_parameters, value_parameters),
            format,
            residual,
            parameter_dtype(format, dtype),
        ),
        Span(*(jnp.asarray(np.asarray(x, np.int32)) for x in (block_tables, starts, counts))),
        *decoded,
    )


def _waiting(
    rng: np.random.Generator, sides: np.ndarray, shape: tuple[int, int], dtype: str
) -> np.ndarray:
    """[2, batch, KV heads, block, dim]: nothing like the keys and values that are packed instead.

    sides: keys and values [2, pages, KV heads, page size, dim].
    shape: sequences, and tokens of a block.
    """
    kv_heads, head_dim = sides.shape[2], sides.shape[4]
    waiting = rng.standard_normal((2, shape[0], kv_heads, shape[1], head_dim))
    waiting *= np.abs(sides).max((1, 2, 3))[:, None, None, None] / 4
    return waiting.astype(NUMPY_DTYPES.get(dtype, dtype))


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
