"""Benchmark of paged attention in every KV format, against its memory floor and cuDNN."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.bench import filled_pages, latent, measure, tables
from mpjax.bench.cached_bytes import cached_bytes
from mpjax.kernels import (
    KVFormat,
    KVLayout,
    KVPages,
    PagedKVCache,
    Span,
    append,
    paged_attention,
    prefill_attention,
)
from mpjax.kernels.attention.shapes import DECODE, LATENT, PREFILL, RAGGED, AttentionShape

# In place of a KV format: prefill of whole prompts, which attend to their own 16-bit keys and
# values, as in a model.
UNCACHED = "uncached"
APPEND_KERNELS = ("append", "flush")  # name prefixes of the kernels that write to the cache
REACH = 5.0  # static scales cover normal keys and values up to this magnitude
# As in a model, the preceding kernel has already transformed the queries.
AS_IN_A_MODEL: dict[str, Any] = {"transformed": True}
PAGE_SIZE = 128
CHECKED_TOKENS = 1 << 19  # with more tokens, the reference would not fit on small GPUs
CHECKED_QUERIES = 32  # only the last queries of a sequence are checked, for the same reason
SETS = {"decode": DECODE, "ragged": RAGGED, "prefill": PREFILL, "latent": LATENT}
COLUMNS: tables.Columns = {
    "shape": "{shape}",
    "format": "{format}",
    "µs": "{microseconds:.1f}",
    "TB/s": tables.scaled("{:.2f}", "gigabytes_per_second", 1e-3),
    "TFLOP/s": "{teraflops:.1f}",
    "× floor": "{times_floor:.2f}",
    "cuDNN µs": "{cudnn_microseconds:.1f}",
    "speed-up": "{speedup:.2f}",
    "append µs": "{append_microseconds:.1f}",
    "error": "{relative_error:.1e}",
}


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The cases of the benchmark: every KV format with every shape.

    formats: KV formats, and UNCACHED, which applies to shapes without cached tokens.

    Raises ValueError for an unknown format, and if there are no cases.
    """

    shapes: tuple[AttentionShape, ...]
    formats: tuple[str, ...]

    def __post_init__(self) -> None:
        for text in self.formats:
            if text != UNCACHED:
                KVFormat.parse(text)
        if not self.cases:
            raise ValueError(f"{UNCACHED}: expected shapes of as many new tokens as context")

    @property
    def cases(self) -> int:
        """The number of rows that `run` yields."""
        return sum(len(self.of_shape(shape)) for shape in self.shapes)

    def of_shape(self, shape: AttentionShape) -> tuple[str, ...]:
        """The formats in which a shape is measured."""
        return tuple(
            text for text in self.formats if text != UNCACHED or shape.queries == shape.context
        )


def named(names: Sequence[str]) -> tuple[AttentionShape, ...]:
    """The distinct shapes of names. A name is a key of SETS, or parsed by AttentionShape.parse.

    Raises ValueError for any other name.
    """
    try:
        shapes = [SETS[name] if name in SETS else (AttentionShape.parse(name),) for name in names]
    except ValueError as error:
        raise ValueError(f"{error}; or one of the sets {', '.join(SETS)}") from None
    return tuple(dict.fromkeys(shape for some in shapes for shape in some))


def figures(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with the figures derived from its measured times.

    GB/s count the bytes read from the cache. TFLOP/s count both products of every query head, with
    its unmasked keys and values; they are left out if the row lacks the sizes of its shape.
    """
    time = row["microseconds"]
    derived = {
        "gigabytes_per_second": row["cache_bytes"] / time / 1e3,
        "times_floor": time / row["floor_microseconds"],
    }
    if row["cudnn_microseconds"] is not None:  # cuDNN has no attention over latents
        derived["speedup"] = row["cudnn_microseconds"] / time
    if "context" in row:
        queries = row.get("queries", 1)
        seen = queries * row["context"] - queries * (queries - 1) // 2
        seen = row["batch"] * seen + (row.get("longest") or row["context"]) - row["context"]
        channels = 2 * row["head_dim"] + (row.get("rotary") or 0)
        derived["teraflops"] = 2 * row["query_heads"] * channels * seen / time / 1e6
    return dict(row) | derived


def failures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each checked row whose error is NaN or not below the limit."""
    return measure.failures(rows, "{shape}, {format}")


def is_checked(shape: AttentionShape) -> bool:
    """Whether a shape is small enough for the reference, which pads sequences to the longest."""
    return shape.batch * max(shape.lengths) <= CHECKED_TOKENS


def run(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """Measures every case of a sweep on the default device, and yields its row.

    Small caches are copied, and the copies are read in turn, so that none stays in the L2 cache.
    """
    for shape in sweep.shapes:
        cudnn = None if shape.rotary else cudnn_microseconds(shape)
        for text in sweep.of_shape(shape):
            if text == UNCACHED:
                yield _uncached(shape, cudnn)
            elif shape.rotary:
                yield _latent(shape, KVFormat.parse(text))
            else:
                yield _format(shape, KVFormat.parse(text), cudnn)


Call = tuple[jax.Array, KVPages, Span]  # arguments of paged_attention


def fill(shape: AttentionShape, format: KVFormat) -> tuple[KVPages, jax.Array]:
    """Pages full of normal keys and values, and their block tables."""
    cache = _cache(shape, format)
    lengths = jnp.asarray(shape.lengths, jnp.int32)
    return filled_pages.fill(cache.layers[0], cache.block_tables, lengths, 0), cache.block_tables


def _cache(shape: AttentionShape, format: KVFormat) -> PagedKVCache:
    """An empty cache of one layer, with as many pages as the shape's sequences fill.

    The number of all pages is rounded up to a multiple of the batch.
    """
    entries = -(-np.asarray(shape.lengths) // PAGE_SIZE)
    cache = PagedKVCache.create(
        KVLayout(shape.kv_heads, shape.head_dim, format, page_size=PAGE_SIZE),
        layers=1,
        batch=shape.batch,
        max_tokens=-(-int(entries.sum()) // shape.batch) * PAGE_SIZE,
        scales=REACH / 127 if format.scaling == "static" else None,
    )
    number, first = np.arange(entries.max()), np.cumsum(entries) - entries
    tables = np.where(number < entries[:, None], first[:, None] + number, 0)
    return dataclasses.replace(cache, block_tables=jnp.asarray(tables, jnp.int32))


def cudnn_microseconds(shape: AttentionShape) -> float:
    """Microseconds of cuDNN's attention over contiguous 16-bit keys and values.

    If one sequence is longer than the others, the others are padded, and cuDNN gets all lengths.
    cuDNN's causal mask has no offset. So new tokens after cached ones take two calls: one over the
    cached tokens without a mask, and a causal one over the new tokens. The time to combine their
    results is not counted.
    """
    if shape.queries == 1:
        lengths = None if shape.longest is None else jnp.asarray(shape.lengths, jnp.int32)
        return _cudnn_call(max(shape.lengths), shape, key_value_seq_lengths=lengths)
    time = _cudnn_call(shape.queries, shape, is_causal=True)
    if cached := shape.context - shape.queries:
        time += _cudnn_call(cached, shape)
    return time


def _cudnn_call(keys: int, shape: AttentionShape, **masks: Any) -> float:
    dims = (shape.batch, keys, shape.kv_heads, shape.head_dim)
    count = measure.copies(2 * 2 * int(np.prod(dims)))
    draw = jax.jit(functools.partial(jax.random.normal, shape=dims, dtype=jnp.bfloat16))
    query = queries(shape)
    caches = [[draw(jax.random.key(2 * i)), draw(jax.random.key(2 * i + 1))] for i in range(count)]
    # An inner `jit`, so that all copies share one trace.
    attend = jax.jit(
        functools.partial(jax.nn.dot_product_attention, implementation="cudnn", **masks)
    )
    each = jax.jit(lambda query, caches: [attend(query, *cache) for cache in caches])
    return measure.microseconds(each, query, caches) / count


def queries(shape: AttentionShape) -> jax.Array:
    """Normally distributed queries of a shape's new tokens."""
    dims = (shape.batch, shape.queries, shape.query_heads, shape.head_dim)
    return jax.random.normal(jax.random.key(1), dims, jnp.bfloat16)


def _latent(shape: AttentionShape, format: KVFormat) -> dict[str, Any]:
    call = latent.call_of(shape, format, PAGE_SIZE)
    row, output = _measure(shape, str(format), latent.attend, call, slice(2, 3), None)
    found = measure.relative_error(output, latent.expected(call)) if is_checked(shape) else None
    return row | {"append_microseconds": _append(*call[2:]), "relative_error": found}


def _format(shape: AttentionShape, format: KVFormat, cudnn: float | None) -> dict[str, Any]:
    pages, block_tables = fill(shape, format)
    counts = jnp.full(shape.batch, shape.queries, jnp.int32)
    span = Span(block_tables, jnp.asarray(shape.lengths, jnp.int32) - counts, counts)
    call = (queries(shape), pages, span)
    attend = functools.partial(paged_attention, **AS_IN_A_MODEL)
    row, output = _measure(shape, str(format), attend, call, slice(1, 2), cudnn)
    error = _error(output, call) if is_checked(shape) else None
    return row | {"append_microseconds": _append(pages, span), "relative_error": error}


def _uncached(shape: AttentionShape, cudnn: float | None) -> dict[str, Any]:
    dims = (shape.batch, shape.context, shape.kv_heads, shape.head_dim)
    keys, values = (jax.random.normal(jax.random.key(i), dims, jnp.bfloat16) for i in (2, 3))
    call = (queries(shape), keys, values)
    row, output = _measure(shape, UNCACHED, prefill_attention, call, slice(1, 3), cudnn)
    error = None
    if is_checked(shape):
        # The reference attends to pages with the same keys and values.
        cache = _cache(shape, KVFormat())
        starts, counts = (jnp.full(shape.batch, n, jnp.int32) for n in (0, shape.context))
        span = Span(cache.block_tables, starts, counts)
        pages = append(cache.layers[0], keys, values, span)
        error = _error(output, (call[0], pages, span))
    return row | {"relative_error": error}


def _measure(
    shape: AttentionShape,
    format: str,
    attend: Callable[..., jax.Array],
    call: tuple[Any, ...],
    cached: slice,
    cudnn: float | None,
) -> tuple[dict[str, Any], jax.Array]:
    """Measures `attend(*call)`; returns its row without the error, and its result.

    cached: the slice of `call` with keys and values.

    The call is repeated, each time with copies of all arguments, so that XLA can't share or fold
    anything between calls.
    """
    held = call[cached]
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(held))
    count = measure.copies(nbytes)
    if isinstance(held[0], KVPages):
        nbytes = cached_bytes(held[0], shape.lengths)
    calls = [call, *(jax.tree.map(jnp.copy, call) for _ in range(count - 1))]
    traced_once = jax.jit(attend)
    each = measure.compiled(lambda calls: [traced_once(*call) for call in calls], calls)
    kernels = measure.merge_names(measure.kernel_microseconds(each, calls), calls=count)
    row = {
        "shape": shape.name,
        **dataclasses.asdict(shape),
        "format": format,
        "cache_bytes": nbytes,
        "copies": count,
        "microseconds": sum(kernels.values()),
        "floor_microseconds": measure.floor_microseconds([call[cached] for call in calls], nbytes),
        "cudnn_microseconds": cudnn,
        "kernel_microseconds": kernels,
    }
    return figures(row), each(calls)[0]


def _append(pages: KVPages, span: Span) -> float | None:
    """Microseconds to quantise new tokens and append them to the pages; None without a kernel.

    The time to copy the pages is not counted: a model donates its pages, but here the next call
    needs them again.
    """
    tokens = int(span.counts.max())
    heads = len(span.counts), tokens, pages.keys.shape[1]
    keys, values = (
        jax.random.normal(jax.random.key(i), (*heads, dim), jnp.bfloat16)
        for i, dim in ((2, pages.head_dim), (3, pages.value_dim))
    )
    times = measure.kernel_microseconds(append, pages, keys, values, span)
    found = [time for name, time in times.items() if name.startswith(APPEND_KERNELS)]
    return sum(found) if found else None


def _error(output: jax.Array, call: tuple[Any, ...]) -> float:
    """The relative error against the float32 reference over the same cache.

    Only the last CHECKED_QUERIES new tokens of each sequence are compared.
    """
    queries, pages, span = call
    checked = min(CHECKED_QUERIES, queries.shape[1])
    left = queries.shape[1] - checked
    reference = functools.partial(paged_attention, implementation="reference", **AS_IN_A_MODEL)
    last = Span(span.block_tables, span.starts + left, span.counts - left)
    expected = jax.jit(reference)(queries[:, left:], pages, last)
    return measure.relative_error(output[:, left:], expected)
