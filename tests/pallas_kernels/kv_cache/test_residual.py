from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import KVFormat, KVLayout, KVPages, PagedKVCache, Span, append
from mpjax.kernels.kv_cache import triton
from tests.pallas_kernels.kv_cache.pages import assert_same_bits, vectors
from tests.pallas_kernels.oracles import kv_keys, kv_values
from tests.sweeps import combinations

HEADS, DIM = 2, 64


def empty(text: str, dtype: str, batch: int, max_tokens: int, page_size: int) -> PagedKVCache:
    return PagedKVCache.create(
        KVLayout(HEADS, DIM, KVFormat.parse(text), page_size=page_size, dtype=dtype),
        layers=1,
        batch=batch,
        max_tokens=max_tokens,
    )


def expected_pages(cache: PagedKVCache, new: np.ndarray, lengths: list[int]) -> KVPages:
    """The pages with tokens new [2, batch, tokens, KV heads, dim] up to the lengths in them."""
    format, before, block = cache.format, cache.layers[0], cache.format.block
    tables = np.asarray(cache.block_tables)
    assert before.residual is not None
    assert block is not None
    arrays: dict[str, Any] = {}
    waiting = []
    for side, stored_by, kind, x in (
        ("key", kv_keys, format.keys, new[0]),
        ("value", kv_values, format.values, new[1]),
    ):
        words = np.array(getattr(before, f"{side}s"))
        parameters = getattr(before, f"{side}_parameters")
        parameters = None if parameters is None else np.array(parameters)
        raw = np.array(getattr(before.residual, f"{side}s"))
        for b, length in enumerate(lengths):
            length = min(length, cache.capacity)
            packed = max(length - 1, 0) // block * block
            heads = x[b].swapaxes(0, 1)  # [KV heads, tokens, dim]
            # A block that was full before it was packed is still there behind the tokens after it.
            for first in range(0, length, block):
                part = heads[:, first : min(first + block, length)]
                raw[b, :, : part.shape[1]] = part
            if not packed:
                continue
            stored = stored_by(heads[:, :packed], str(kind))
            for position in range(packed):
                entry, slot = divmod(position, before.page_size)
                page = tables[b, entry]
                words[page, :, slot] = stored.words[:, position]
                if parameters is not None:
                    per = before.page_size // parameters.shape[2]  # tokens for each
                    parameters[page, :, slot // per] = stored.parameters[:, position // per]
        arrays |= {f"{side}s": words, f"{side}_parameters": parameters}
        waiting.append(raw)
    return dataclasses.replace(
        before, **arrays, residual=KVPages(waiting[0], waiting[1], None, None, KVFormat())
    )


def assert_same(actual: KVPages, expected: KVPages, lengths: list[int]) -> None:
    """Bit by bit, but for slots of the residual that don't count."""
    assert_same_bits(actual, expected)
    assert actual.residual is not None
    assert expected.residual is not None
    block = actual.residual.page_size
    for sides in zip(actual.residual.sides, expected.residual.sides, strict=True):
        one, other = (np.asarray(side.words) for side in sides)
        for b, length in enumerate(lengths):
            count = length - max(length - 1, 0) // block * block
            np.testing.assert_array_equal(one[b, :, :count], other[b, :, :count])


def compiled(implementation: str) -> Any:
    step = functools.partial(append, implementation=implementation)
    return jax.jit(step)


plain = compiled("reference")


def write(
    cache: PagedKVCache,
    new: np.ndarray,
    chunks: list[list[int]],
    step: Any,
    pages: KVPages | None = None,
    starts: np.ndarray | None = None,
    width: int = 0,
) -> KVPages:
    """The pages after appending so many tokens of each sequence at a time, from `starts` on.

    width: of a chunk at least, with its padding.
    """
    pages = cache.layers[0] if pages is None else pages
    starts = np.zeros(len(chunks[0]), np.int32) if starts is None else starts
    for counts in chunks:
        chunk = np.zeros((2, len(counts), max(*counts, width), HEADS, DIM), new.dtype)
        for b, count in enumerate(counts):
            chunk[:, b, :count] = new[:, b, starts[b] : starts[b] + count]
        span = Span(cache.block_tables, jnp.asarray(starts), jnp.asarray(counts, jnp.int32))
        pages = step(pages, jnp.asarray(chunk[0]), jnp.asarray(chunk[1]), span)
        starts = starts + np.array(counts, np.int32)
    return pages


@pytest.mark.parametrize(
    ("text", "dtype", "page_size", "implementation", "padded"),
    [
        ("KV2", "float16", 128, "triton", True),
        ("KV2g32", "float16", 32, "reference", True),
        ("KV2t", "bfloat16", 16, "triton", True),
    ],
)
def test_bit_for_bit_about_a_boundary(
    text, dtype, page_size, implementation, padded, rng, interpreted_triton
):
    """Up to one token before the end of a block, to the end, and to the next; and on from there.

    padded: what comes one by one, to the width of the prompt, for which there is a program already.
    """
    block = KVFormat.parse(text).block
    assert block is not None
    cache = empty(text, dtype, 3, 2 * block, page_size)
    new = vectors(rng, (2, 3, block + 3, HEADS, DIM), dtype)
    chunks = [[block - 1, block, block + 1], [1, 1, 0], [1, 1, 1]]
    step, pages, lengths = compiled(implementation), cache.layers[0], np.zeros(3, np.int32)
    for counts in chunks:
        pages = write(cache, new, [counts], step, pages, lengths, (block + 1) * padded)
        lengths = lengths + np.array(counts, np.int32)
        assert_same(pages, expected_pages(cache, new, lengths.tolist()), lengths.tolist())


@pytest.mark.parametrize(("implementation", "longest"), [("triton", None), ("reference", 20)])
def test_tokens_can_be_varlen(implementation, longest, rng, interpreted_triton):
    """One completes a block, one adds nothing, one begins; behind them is padding."""
    cache = empty("KV4c", "bfloat16", 3, 256, 128)
    new = vectors(rng, (2, 3, 140, HEADS, DIM), "bfloat16")
    pages = write(cache, new, [[120, 130, 0]], plain)
    starts, counts = [120, 130, 0], [20, 0, 3]
    rows = [
        new[:, b, start : start + n]
        for b, (start, n) in enumerate(zip(starts, counts, strict=True))
    ]
    flat = np.concatenate([*rows, np.zeros_like(rows[2])], 1)
    places = (jnp.asarray(np.array(x, np.int32)) for x in (starts, counts))
    span = Span(cache.block_tables, *places, longest=longest)
    pages = compiled(implementation)(pages, *(jnp.asarray(x) for x in flat), span)
    lengths = np.add(starts, counts).tolist()
    assert_same(pages, expected_pages(cache, new, lengths), lengths)


@pytest.mark.parametrize("implementation", ["triton"])
def test_a_residual_lies_where_the_span_says(implementation, rng, interpreted_triton):
    cache = empty("KV4c", "bfloat16", 2, 512, 128)
    new = vectors(rng, (2, 2, 512, HEADS, DIM), "bfloat16")
    lengths, order = [300, 200], np.array([3, 1])
    before = cache.layers[0]
    assert before.residual is not None
    spread = jax.tree.map(lambda x: jnp.zeros((4, *x.shape[1:]), x.dtype), before.residual)
    pages = dataclasses.replace(before, residual=spread)
    append = compiled(implementation)
    starts = np.zeros(2, np.int32)
    for counts in (np.array([100, 200]), np.array([200, 0])):
        chunk = np.stack([new[:, b, s : s + 200] for b, s in enumerate(starts)], 1)
        span = Span(cache.block_tables, starts, counts, residual_pages=order[:, None])
        pages = append(pages, *map(jnp.asarray, chunk), span)
        starts = starts + counts.astype(np.int32)
    assert pages.residual is not None
    own = jax.tree.map(lambda x: x[order], pages.residual)
    pages = dataclasses.replace(pages, residual=own)
    assert_same(pages, expected_pages(cache, new, lengths), lengths)


@pytest.mark.parametrize("implementation", ["triton"])
def test_a_block_that_is_encoded_already_stays(implementation, rng, interpreted_triton):
    """The residual of a sequence that begins behind a shared prefix has nothing of it."""
    cache = empty("KV4c", "bfloat16", 2, 512, 128)
    new = vectors(rng, (2, 2, 300, HEADS, DIM), "bfloat16")
    shared = write(cache, new, [[257, 129]], plain)
    shared = dataclasses.replace(shared, residual=cache.layers[0].residual)
    starts, counts = np.array([256, 128]), np.array([44, 172])
    chunk = np.zeros((2, 2, 172, HEADS, DIM), new.dtype)
    for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
        chunk[:, b, :count] = new[:, b, start : start + count]
    span = Span(cache.block_tables, starts, counts, encoded=starts)
    pages = compiled(implementation)(shared, *map(jnp.asarray, chunk), span)
    assert_same(pages, expected_pages(cache, new, [300, 300]), [300, 300])


@pytest.mark.parametrize(
    ("text", "tokens"), [("K4cV4c", 512), ("KV2", 1), ("KV2", 512), ("KV2t", 1)]
)
def test_flush_lowers_with_every_page_array_aliased(text, tokens, lower_for_cuda):
    cache = jax.eval_shape(lambda: empty(text, "bfloat16", 4, 4096, 128))
    new = None
    if tokens > 1:
        new = jax.ShapeDtypeStruct((4, tokens, HEADS, DIM), jnp.bfloat16)
    span = Span(cache.block_tables, cache.lengths, cache.lengths, longest=tokens)
    program = lower_for_cuda(triton.flush, cache.layers[0], new, new, span)
    assert f'name = "flush_{text.lower()}"' in program
    arrays = 6  # words and parameters of keys and values, and both that wait
    assert program.count("#stablehlo.output_operand_alias<") == arrays
    first = 4 + (0 if new is None else 2)
    for index in range(arrays):
        assert f"output_tuple_indices = [{index}], operand_index = {first + index}," in program


@pytest.mark.gpu
@combinations(
    1,
    case=[
        ("KV4c", 256),
        ("KV4cg32", 32),
        ("KV2", 128),
        ("KV2g64", 64),
        ("KV2t", 16),
        ("K8V2", 128),
        ("K4cV4c", 256),
    ],
    dtype=["bfloat16", "float16"],
)
def test_bit_for_bit_on_the_gpu(case, dtype, rng):
    text, page_size = case
    block = KVFormat.parse(text).block
    assert block is not None
    cache = empty(text, dtype, 4, 5 * block, page_size)
    new = vectors(rng, (2, 4, 5 * block, HEADS, DIM), dtype)
    chunks = [[block - 1, block, 0, 4 * block + 7], [1, 1, 1, 0], [1, 1, 2 * block, block - 7]]
    lengths = np.sum(chunks, 0).tolist()
    pages = write(cache, new, chunks, compiled("triton"))
    assert_same(pages, expected_pages(cache, new, lengths), lengths)
