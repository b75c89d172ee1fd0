"""Pages with something in them, and what append must make of them, in numpy."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels import KVFormat, KVPages, Span
from tests.pallas_kernels.oracles import KEY_GROUPS, NUMPY_DTYPES, kv_key, kv_side

SEQUENCES = 4  # of `ragged_append`


def random_pages(
    rng: np.random.Generator,
    format: KVFormat,
    *,
    pages: int,
    kv_heads: int,
    page_size: int,
    head_dim: int,
    dtype: str,
) -> KVPages:
    """Pages full of arbitrary bits, or values for 16-bit codes, so that every write shows.

    Given scales are around 1, and of few bits, so that their reciprocals are easy to round.
    """
    shape = (pages, kv_heads, page_size)

    def plain(shape: tuple[int, ...]) -> jax.Array:
        values = rng.standard_normal((*shape, head_dim))
        return jnp.asarray(values.astype(NUMPY_DTYPES.get(dtype, dtype)))

    def stored(kind: object, group: int | None = None) -> tuple[jax.Array, jax.Array | None]:
        if kind == 16:
            return plain(shape), None
        width = head_dim // {"4": 4, "2": 8}.get(str(kind)[0], 2)
        words = jnp.asarray(rng.integers(0, 2**16, (*shape, width), dtype=np.uint16))
        if kind in ("fp8", "8s"):
            given = (kv_heads,) if kind == "fp8" else (kv_heads, head_dim)
            scales = rng.uniform(0.5, 2, given).astype(np.float16).astype(np.float32)
            return words, jnp.asarray(scales)
        groups = shape if group is None else (*shape[:2], page_size // group, head_dim)
        return words, jnp.asarray(rng.integers(0, 2**32, groups, dtype=np.uint32))

    keys, key_parameters = stored(format.keys, KEY_GROUPS.get(str(format.keys)))
    values, value_parameters = stored(format.values, format.value_codes.group)
    waiting = None
    if format.block is not None:
        waiting = [plain((SEQUENCES, kv_heads, format.block)) for _ in range(2)]
        waiting = KVPages(waiting[0], waiting[1], None, None, KVFormat())
    return KVPages(
        *(keys, values, key_parameters, value_parameters),
        format,
        waiting,
        parameter_dtype(format, dtype),
    )


def parameter_dtype(format: KVFormat, dtype: str) -> str | None:
    """The dtype of the scales and zeros that pages keep beside keys and values of `dtype`."""
    kept = {"8", "4", "4t", "2", "2t"} & {str(format.keys), str(format.values)} or format.group
    return (dtype if dtype == "bfloat16" else "float16") if kept else None


def given_scale(parameters: jax.Array | None, kind: object) -> np.ndarray | None:
    """As oracles take it, for [..., KV heads, head dim]."""
    if kind not in ("fp8", "8s"):
        return None
    scales = np.asarray(parameters)
    return scales[:, None] if kind == "fp8" else scales


def appended(
    pages: KVPages,
    keys: np.ndarray,
    values: np.ndarray,
    block_tables: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
) -> KVPages:
    """The pages after append, token by token."""
    result: dict[str, Any] = {}
    for name, new, kind, coded in (
        ("key", keys, pages.format.keys, kv_key),
        ("value", values, pages.format.values, kv_side),
    ):
        stored = np.array(getattr(pages, f"{name}s"))
        before = getattr(pages, f"{name}_parameters")
        scale = given_scale(before, kind)
        side = coded(new, str(kind), scale)
        parameters = None if side.parameters is None else np.array(before)
        for b, count in enumerate(counts):
            for t in range(count):
                entry, slot = divmod(int(starts[b]) + t, pages.page_size)
                if not 0 <= entry < block_tables.shape[1]:
                    continue
                page = block_tables[b, entry]
                stored[page, :, slot] = side.words[b, t]
                if parameters is not None and side.parameters is not None:
                    parameters[page, :, slot] = side.parameters[b, t]
        result[f"{name}s"] = stored
        result[f"{name}_parameters"] = before if parameters is None else parameters
    return dataclasses.replace(pages, **result)


def assert_same_bits(actual: KVPages, expected: KVPages) -> None:
    assert actual.format == expected.format
    assert actual.parameter_dtype == expected.parameter_dtype
    for field in ("keys", "values", "key_parameters", "value_parameters"):
        one, other = getattr(actual, field), getattr(expected, field)
        if other is None:
            assert one is None
            continue
        one, other = np.asarray(one), np.asarray(other)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8), err_msg=field)


def vectors(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Keys or values [..., dim] of all kinds: constant, tiny, far from zero, or with an outlier."""
    x = rng.standard_normal(shape) * 10 ** rng.uniform(-6, 2, shape[:-1])[..., None]
    x += 10 * rng.standard_normal((*shape[:-1], 1)) * rng.integers(0, 2, (*shape[:-1], 1))
    x[..., 5] *= np.where(rng.random(shape[:-1]) < 0.3, 50, 1)
    kind = rng.random(shape[:-1])
    x[kind < 0.1] = 0
    x[kind > 0.9] = 3.14
    return x.astype(NUMPY_DTYPES.get(dtype, dtype))


@dataclasses.dataclass(frozen=True)
class Append:
    """Arguments of an append besides the pages."""

    keys: np.ndarray
    values: np.ndarray
    block_tables: np.ndarray
    starts: np.ndarray
    counts: np.ndarray

    def arrays(self) -> tuple[jax.Array, jax.Array, Span]:
        return jnp.asarray(self.keys), jnp.asarray(self.values), self.span()

    def span(self) -> Span:
        """As one that has been read."""
        arrays = (jnp.asarray(x) for x in (self.block_tables, self.starts, self.counts))
        return Span(*arrays, longest=self.keys.shape[1])

    def oracle(self, pages: KVPages) -> KVPages:
        return appended(pages, *(getattr(self, field.name) for field in dataclasses.fields(self)))


def append_from_before_the_pages(rng: np.random.Generator, pages: KVPages, dtype: str) -> Append:
    """As `ragged_append`'s five tokens, but the first sequence starts two positions before 0."""
    new = ragged_append(rng, pages, 5, dtype)
    return dataclasses.replace(new, starts=new.starts - np.array([5, 0, 0, 0], np.int32))


def ragged_append(rng: np.random.Generator, pages: KVPages, tokens: int, dtype: str) -> Append:
    """Four sequences in scattered pages: one in the middle of a page, one that adds nothing, one
    across a page boundary, and one that runs past the end of its block table."""
    total, kv_heads, page_size, _ = pages.keys.shape
    block_tables = rng.permutation(total).astype(np.int32)[: total // SEQUENCES * SEQUENCES]
    block_tables = block_tables.reshape(SEQUENCES, -1)
    end = block_tables.shape[1] * page_size
    starts = np.array([3, 7, page_size - 1, end - 2], np.int32)
    counts = np.array([tokens, 0, max(tokens - 1, 1), tokens], np.int32)
    shape = (4, tokens, kv_heads, pages.head_dim)
    return Append(
        vectors(rng, shape, dtype), vectors(rng, shape, dtype), block_tables, starts, counts
    )
