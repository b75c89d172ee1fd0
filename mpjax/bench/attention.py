"""Paged decode attention over every KV format, beside the floor of its bytes and cuDNN."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.bench import filled_pages, measure
from pallas_kernels import KVFormat, KVPages, PagedKVCache, paged_attention
from pallas_kernels.attention.shapes import DECODE, AttentionShape

GATE = 8e-3  # mean error over mean magnitude, for bfloat16
CHECKED_TOKENS = 1 << 17  # the reference of more would not fit on smaller GPUs
HEADERS = (
    *("shape", "format", "µs", "TB/s", "TFLOP/s", "× floor"),
    *("cuDNN µs", "speed-up", "error"),
)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What to measure: every KV format, for each shape.

    Raises ValueError for a format that can't be read.
    """

    shapes: tuple[AttentionShape, ...]
    formats: tuple[str, ...]

    def __post_init__(self) -> None:
        for text in self.formats:
            KVFormat.parse(text)

    @property
    def cases(self) -> int:
        """Number of rows that `run` gives."""
        return len(self.shapes) * len(self.formats)


def named(names: Sequence[str]) -> tuple[AttentionShape, ...]:
    """The decode shapes of these names. Raises ValueError, listing all, for an unknown one."""
    known = {shape.name: shape for shape in DECODE}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"unknown shape {unknown[0]!r}: expected one of {', '.join(known)}")
    return tuple(known[name] for name in names)


def figures(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with what follows from its measured times.

    GB/s count the cache. TFLOP/s count the two products of every query head with its keys and
    values, and are left out of a row that does not say its shape in numbers.
    """
    time = row["microseconds"]
    derived = {
        "gigabytes_per_second": row["cache_bytes"] / time / 1e3,
        "times_floor": time / row["floor_microseconds"],
        "speedup": row["cudnn_microseconds"] / time,
    }
    if "context" in row:
        products = row["batch"] * row["query_heads"] * row["head_dim"] * row["context"]
        derived["teraflops"] = 2 * 2 * products / time / 1e6
    return dict(row) | derived


def cells(row: Mapping[str, Any]) -> list[str]:
    """The texts of a row of the table, in the order of HEADERS."""
    row = figures(row)
    error, teraflops = row["relative_error"], row.get("teraflops")
    return [
        row["shape"],
        row["format"],
        f"{row['microseconds']:.1f}",
        f"{row['gigabytes_per_second'] / 1e3:.2f}",
        "" if teraflops is None else f"{teraflops:.1f}",
        f"{row['times_floor']:.2f}",
        f"{row['cudnn_microseconds']:.1f}",
        f"{row['speedup']:.2f}",
        "" if error is None else f"{error:.1e}",
    ]


def failures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each checked row whose error is not below the gate; a NaN is not."""
    return [
        f"{row['shape']}, {row['format']}: the error is {row['relative_error']:.1e}, "
        f"and the gate is {GATE:.0e}"
        for row in rows
        if row["relative_error"] is not None and not row["relative_error"] < GATE
    ]


def is_checked(shape: AttentionShape) -> bool:
    """Whether the reference is computed, too."""
    return shape.batch * shape.context <= CHECKED_TOKENS


def run(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """Measures every case of a sweep on the default device, and gives its row.

    Small caches are copied and read in turn, so that none is in the L2 cache.
    """
    for shape in sweep.shapes:
        cudnn = _cudnn(shape)
        for text in sweep.formats:
            yield _format(shape, KVFormat.parse(text), cudnn)


def fill(shape: AttentionShape, format: KVFormat) -> tuple[KVPages, jax.Array]:
    """Pages full of normal keys and values, and their block tables."""
    cache = PagedKVCache.create(
        layers=1,
        batch=shape.batch,
        max_tokens=shape.context,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        format=format,
    )
    return filled_pages.fill(
        cache.layers[0], cache.block_tables, shape.context, 0
    ), cache.block_tables


def _cudnn(shape: AttentionShape) -> float:
    dims = (shape.batch, shape.context, shape.kv_heads, shape.head_dim)
    count = measure.copies(2 * 2 * int(np.prod(dims)))
    query = jnp.ones((shape.batch, 1, shape.query_heads, shape.head_dim), jnp.bfloat16)
    draw = jax.jit(lambda key: jax.random.normal(key, dims, jnp.bfloat16))
    caches = [[draw(jax.random.key(2 * i)), draw(jax.random.key(2 * i + 1))] for i in range(count)]
    attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    each = jax.jit(lambda query, caches: [attend(query, *cache) for cache in caches])
    return measure.microseconds(each, query, caches) / count


def _format(shape: AttentionShape, format: KVFormat, cudnn: float) -> dict[str, Any]:
    pages, block_tables = fill(shape, format)
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(pages))
    count = measure.copies(nbytes)
    dims = (shape.batch, 1, shape.query_heads, shape.head_dim)
    query = jax.random.normal(jax.random.key(1), dims, jnp.bfloat16)
    last = jnp.full(shape.batch, shape.context - 1, jnp.int32)
    call = (query, pages, block_tables, last, jnp.ones_like(last))
    # Each call has all of its arguments for itself: XLA must find nothing to share or to fold.
    calls = [call, *(jax.tree.map(jnp.copy, call) for _ in range(count - 1))]
    each = jax.jit(lambda calls: [paged_attention(*call) for call in calls])
    kernels = measure.merge_names(measure.kernel_microseconds(each, calls), calls=count)
    return figures(
        {
            "shape": shape.name,
            **dataclasses.asdict(shape),
            "format": str(format),
            "cache_bytes": nbytes,
            "copies": count,
            "microseconds": sum(kernels.values()),
            "floor_microseconds": measure.floor_microseconds([call[1] for call in calls]),
            "cudnn_microseconds": cudnn,
            "relative_error": _error(each(calls)[0], call) if is_checked(shape) else None,
            "kernel_microseconds": kernels,
        }
    )


def _error(output: jax.Array, call: tuple[Any, ...]) -> float:
    """Mean error over mean magnitude, against the float32 reference over the same cache."""
    reference = functools.partial(paged_attention, implementation="reference")
    found = np.asarray(output, np.float64)
    exact = np.asarray(jax.jit(reference)(*call), np.float64)
    return float(np.abs(found - exact).mean() / np.abs(exact).mean())
