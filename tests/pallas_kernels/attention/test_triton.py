from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import KVFormat, KVLayout, Masks, PagedKVCache, Span, paged_attention
from mpjax.kernels.attention import reference, shapes, triton
from mpjax.kernels.attention.plans import Problem
from mpjax.kernels.attention.plans.rule import config_by_rule
from tests.pallas_kernels.attention.scenes import CHUNKS, DECODE, Scene, kernel, scene, sinks_of
from tests.pallas_kernels.oracles import GATES
from tests.sweeps import combinations, in_sweep

few_formats = pytest.mark.parametrize("text", ["KV4"])
EVERY_FORMAT = ["KV16", "KV8", "KV8s", "KV4", "KVfp8", "KV4c", "K8V4c", "KV2"]
LIKE_OTHERS = ["KV8", "K8V4c"]
VARIANTS = [*EVERY_FORMAT, "KV4t", "KV4cg64", "KV4cg32", "K4cV4c", "KV2g64", "KV2g32", "KV2t"]
HALF_PRECISION = ["bfloat16", "float16"]


def check(test: Scene, dtype: str, splits: int | None, window: int | None = None) -> None:
    out = kernel(*test.arguments, splits=splits, window=window)
    assert test.error(out, window=window) < GATES[dtype]
    empty = np.asarray(test.span.ends) == 0
    np.testing.assert_array_equal(np.asarray(out)[empty], 0)


# Nothing packed yet, a block that is full and the same with one token more, and more blocks.
BLOCKS: dict[str, Any] = {"starts": [0, 0, 127, 128, 400], "counts": [0, 1, 1, 1, 1]}
BLOCK_CHUNKS: dict[str, Any] = {"starts": [0, 120, 400], "counts": [20, 20, 0]}


@pytest.mark.parametrize(
    ("text", "splits", "page_size", "head_dim", "lengths"),
    [("KV4cg32", 5, 32, 96, BLOCKS), ("K8V4cg32", 1, 64, 64, BLOCK_CHUNKS)],
)
def test_what_waits_is_attended_beside_what_is_packed(
    text, splits, page_size, head_dim, lengths, rng
):
    test = scene(rng, text, "float16", page_size=page_size, head_dim=head_dim, **lengths)
    masks = {"window": 150, "softcap": 3.0, "sinks": sinks_of(rng, 4)}
    out = kernel(*test.arguments, splits=splits, **masks)
    assert test.error(out, **masks) < GATES["float16"]


@pytest.mark.parametrize(
    ("text", "dtype", "heads", "head_dim", "splits", "lengths", "masked"),
    [
        ("KV2t", "float16", (2, 2), 128, 3, BLOCKS, True),  # each reads a share of both
        ("K4cV4c", "bfloat16", (1, 12), 64, 1, BLOCKS, False),  # two tiles of rows
        ("KV2", "float16", (2, 2), 96, 1, BLOCK_CHUNKS, True),  # wide ones, of several tokens
    ],
)
def test_one_program_reads_what_is_packed_and_what_waits(
    text, dtype, heads, head_dim, splits, lengths, masked, rng
):
    test = scene(rng, text, dtype, heads=heads, head_dim=head_dim, **lengths)
    masks: dict[str, Any] = {}
    if masked:
        masks = {"window": 150, "softcap": 3.0, "sinks": sinks_of(rng, heads[0] * heads[1])}
    out = kernel(*test.arguments, splits=splits, residual_splits=0, **masks)
    assert test.error(out, **masks) < GATES[dtype]


@pytest.mark.gpu
@combinations(
    1,
    text=["KV2", "KV2g32", "KV2t", "KV4c", "KV4cg32", "K4cV4c", "K8V4c", "K8V2"],
    dtype=HALF_PRECISION,
    lengths=[BLOCKS, BLOCK_CHUNKS],
    case=[((2, 4), 128, False), ((1, 12), 64, True), ((1, 5), 96, False), ((1, 6), 256, True)],
)
def test_one_program_reads_both_on_the_gpu(text, dtype, lengths, case, rng):
    heads, head_dim, masked = case
    test = scene(rng, text, dtype, heads=heads, head_dim=head_dim, **lengths)
    masks: dict[str, Any] = {}
    if masked:
        masks = {"window": 300, "softcap": 2.0, "sinks": sinks_of(rng, heads[0] * heads[1])}
    options = {"splits": 1, "residual_splits": 0, "interpret": False, **masks}
    assert test.error(kernel(*test.arguments, **options), **masks) < GATES[dtype]


@pytest.mark.parametrize(
    ("text", "dtype", "heads", "splits", "window"),
    [
        ("KV8s", "float16", (3, 1), 2, None),
        ("K8V4", "bfloat16", (1, 12), 2, 70),  # of sixteen rows
        ("K4cV8", "bfloat16", (1, 12), 2, 70),  # of eight, twice
    ],
)
def test_decoding(text, dtype, heads, splits, window, rng):
    check(scene(rng, text, dtype, heads=heads, **DECODE), dtype, splits, window)


@pytest.mark.parametrize(
    ("text", "dtype", "heads", "head_dim", "page_size", "lengths"),
    [
        ("KV16", "bfloat16", (1, 6), 96, 256, CHUNKS),
        ("KV4", "float16", (1, 1), 256, 32, CHUNKS),
        ("KV4", "bfloat16", (1, 4), 80, 32, DECODE),
        in_sweep("KV8", "float16", (1, 2), 112, 32, CHUNKS),
        in_sweep("KV4t", "bfloat16", (1, 4), 160, 32, DECODE),
        in_sweep("KV8", "bfloat16", (1, 4), 192, 32, DECODE),
        ("KV8", "bfloat16", (1, 12), 512, 32, DECODE),
        in_sweep("KV16", "bfloat16", (1, 4), 512, 32, CHUNKS),
    ],
)
def test_heads_and_pages_of_other_sizes(text, dtype, heads, head_dim, page_size, lengths, rng):
    sizes: dict[str, Any] = {"heads": heads, "head_dim": head_dim, "page_size": page_size}
    check(scene(rng, text, dtype, **sizes, **lengths), dtype, 2)


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    ("text", "dtype", "heads", "splits", "window"),
    [
        ("KV8", "float16", (1, 7), 1, 25),
        ("K4Vfp8", "bfloat16", (2, 1), 2, 25),
    ],
)
def test_chunked_prefill(text, dtype, heads, splits, window, rng):
    check(scene(rng, text, dtype, heads=heads, **CHUNKS), dtype, splits, window)


def check_chunks(lengths, splits, rng, **options) -> None:
    """Decoding and prefill where chunks begin inside tiles of keys, and at their ends."""
    for window in (48, 64):
        test, masks = scene(rng, "KV8", "bfloat16", **lengths), {"window": window, "chunked": True}
        out = kernel(*test.arguments, splits=splits, **masks, **options)
        assert test.error(out, **masks) < GATES["bfloat16"]


@pytest.mark.parametrize(("lengths", "splits"), [(DECODE, 2), (CHUNKS, 1)])
def test_tokens_attend_to_their_own_chunk_of_positions(lengths, splits, rng):
    check_chunks(lengths, splits, rng)


# A long sequence in the middle, a longer one at the end; one of them empty, one of two new tokens.
RAGGED: dict[str, Any] = {"starts": [5, 0, 1500, 63, 200, 2100], "counts": [1, 0, 2, 1, 2, 1]}


@pytest.mark.gpu
@pytest.mark.parametrize(("lengths", "splits"), [(DECODE, 2), (CHUNKS, 1), (RAGGED, 2)])
def test_chunks_of_positions_on_the_gpu(lengths, splits, rng):
    check_chunks(lengths, splits, rng, interpret=False)


@pytest.mark.parametrize(
    ("text", "dtype", "heads", "splits", "masks"),
    [
        ("KV4", "float16", (2, 3), 1, {"softcap": 3.0, "sinks": True}),
        ("KV8", "bfloat16", (1, 20), 2, {}),  # a wide tile, most of whose keys need no mask
    ],
)
def test_programs_of_short_sequences_help_long_ones(text, dtype, heads, splits, masks, rng):
    test = scene(rng, text, dtype, heads=heads, page_size=32, **RAGGED)
    if "sinks" in masks:
        masks = {**masks, "sinks": sinks_of(rng, heads[0] * heads[1])}
    out = kernel(*test.arguments, splits=splits, is_balanced=True, **masks)
    assert test.error(out, **masks) < GATES[dtype]


def test_programs_that_help_read_what_waits_of_their_own_sequence(rng):
    """They read packed keys of other sequences in the same loop."""
    test = scene(rng, "KV2t", "bfloat16", heads=(2, 3), page_size=32, **RAGGED)
    masks = {"window": 1000, "sinks": sinks_of(rng, 6)}
    out = kernel(*test.arguments, splits=1, residual_splits=0, is_balanced=True, **masks)
    assert test.error(out, **masks) < GATES["bfloat16"]


@pytest.mark.gpu
@combinations(1, text=["KV2t", "K8V4c", "K8V2"], heads=[(2, 4), (1, 12)], dtype=HALF_PRECISION)
def test_programs_that_help_read_what_waits_on_the_gpu(text, heads, dtype, rng):
    test = scene(rng, text, dtype, heads=heads, head_dim=128, **RAGGED)
    options: dict[str, Any] = {"splits": 1, "residual_splits": 0, "is_balanced": True}
    masks = {"sinks": sinks_of(rng, heads[0] * heads[1])}
    out = kernel(*test.arguments, interpret=False, **options, **masks)
    assert test.error(out, **masks) < GATES[dtype]


def test_varlen_sequences_whose_programs_read_both(rng):
    places = {"starts": [0, 126, 400, 250], "counts": [3, 4, 0, 1]}
    test = scene(rng, "KV2t", "bfloat16", heads=(2, 3), **places)
    masks: dict[str, Any] = {"window": 90, "sinks": sinks_of(rng, 6)}
    _, pages, span = test.arguments
    shape = span.block_tables.shape
    config = config_by_rule(Problem.of(12, pages, shape, is_varlen=True))
    config = dataclasses.replace(config, splits=1, residual_splits=0)
    span, queries = dataclasses.replace(span, longest=4), test.varlen_queries(padding=5)
    out = triton.paged_attention(queries, pages, span, Masks(**masks), config, interpret=True)
    assert test.error(test.padded(out), **masks) < GATES["bfloat16"]


@pytest.mark.parametrize("residual_splits", [in_sweep(0), 2])
def test_a_residual_lies_where_the_span_says(residual_splits, rng):
    test = scene(rng, "KV4c", "bfloat16", **BLOCKS)
    queries, pages, span = test.arguments
    assert pages.residual is not None
    order = rng.permutation(len(span.starts) + 2)[: len(span.starts)].astype(np.int32)

    def spread(x):
        pages = jnp.full((len(span.starts) + 2, *x.shape[1:]), 7, x.dtype)
        return pages.at[order].set(x)

    pages = dataclasses.replace(pages, residual=jax.tree.map(spread, pages.residual))
    span = dataclasses.replace(span, residual_pages=jnp.asarray(order[:, None]))
    out = kernel(queries, pages, span, splits=2, residual_splits=residual_splits)
    assert test.error(out) < GATES["bfloat16"]
    read = span.read("attention", queries.shape[:2])
    out = jax.jit(reference.paged_attention)(queries, pages, read)
    assert test.error(out) < GATES["bfloat16"]


@pytest.mark.gpu
@combinations(
    1,
    text=EVERY_FORMAT,
    dtype=HALF_PRECISION,
    case=[
        (1, (2, 4), {}),
        (3, (3, 1), {"window": 1200}),
        (1, (1, 7), {"softcap": 2.0}),
        (2, (1, 12), {}),
    ],
)
def test_programs_help_on_the_gpu(text, dtype, case, rng):
    splits, heads, masks = case
    test = scene(rng, text, dtype, heads=heads, head_dim=128, **RAGGED)
    out = kernel(*test.arguments, splits=splits, is_balanced=True, interpret=False, **masks)
    assert test.error(out, **masks) < GATES[dtype]


@pytest.mark.one_of(4)
@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        *(in_sweep(text, 1) if text in LIKE_OTHERS else (text, 1) for text in EVERY_FORMAT),
        *((text, 512) if text in ("KV16", "KV2") else in_sweep(text, 512) for text in EVERY_FORMAT),
    ],
)
@pytest.mark.parametrize("kinds", ["few"])
def test_lowers_for_named_shapes(text, tokens, kinds, lower_for_cuda):
    """Heads of every size, by turns in either dtype, with masks and without; of 128 in both.

    kinds: few are told apart by the size of heads; all, also by tile, splits, what is left of a
        tile, the dtype, and whether programs help each other.
    """
    lowered = set()
    for number, shape in enumerate(shapes.DECODE + shapes.SMALL):
        smallest = KVFormat.parse(text).group or 16
        variants = [("bfloat16", None, 128), ("float16", 1000, smallest)]
        for dtype, window, page_size in variants[:: (-1) ** number]:
            cache = jax.eval_shape(
                lambda shape=shape, dtype=dtype, page_size=page_size: PagedKVCache.create(
                    KVLayout(
                        shape.kv_heads, shape.head_dim, text, page_size=page_size, dtype=dtype
                    ),
                    layers=1,
                    batch=shape.batch,
                    max_tokens=shape.context + tokens,
                    scales=1.0 if KVFormat.parse(text).scaling else None,
                )
            )
            group = shape.query_heads // shape.kv_heads
            places = cache.block_tables.shape
            config = config_by_rule(Problem.of(tokens * group, cache.layers[0], places))
            splits = config.splits > 1, config.residual_splits > 0
            ragged = tokens * group % config.tile_rows > 0
            in_both = shape.head_dim == 128 and dtype
            balanced = config.is_balanced
            key: tuple[Any, ...] = (shape.head_dim,)
            if kinds == "all":
                key += config.tile_rows, splits, ragged, in_both, balanced
            if key in lowered:
                continue
            lowered.add(key)
            queries = (shape.batch, tokens, shape.query_heads, shape.head_dim)
            is_varlen = tokens > 1 and dtype == "float16"
            masks = Masks(0.1)
            if window is not None:
                sinks = jax.ShapeDtypeStruct((shape.query_heads,), dtype)
                masks = Masks(0.1, window, 30.0, sinks)
            program = lower_for_cuda(
                functools.partial(triton.paged_attention, config=config),
                jax.ShapeDtypeStruct(queries[1:] if is_varlen else queries, dtype),
                cache.layers[0],
                Span(cache.block_tables, cache.lengths, cache.lengths, longest=tokens),
                masks,
            )
            assert f'name = "attention_{text.lower()}"' in program
            is_decoded = any(f"{name}.b32" in program for name in ("lop3", "prmt"))
            assert is_decoded == (text != "KV16")
            assert ("ttg.maxnreg" in program) == (config.registers is not None)


@pytest.mark.gpu
@combinations(
    1,
    operands=list(itertools.product(EVERY_FORMAT, HALF_PRECISION)),
    case=[
        ((2, 2), 64, 128, 1, None),
        ((1, 7), 128, 64, 2, 30),
        ((3, 1), 128, 128, 5, None),
        ((2, 4), 128, 128, 1, 1),
        ((2, 4), 64, 64, 5, 70),
        ((1, 5), 96, 16, 2, None),
        ((1, 6), 256, 256, 1, 30),
        ((1, 12), 96, 32, 3, None),
        ((2, 4), 256, 64, 2, None),
        ((2, 4), 80, 64, 2, None),
        ((2, 4), 112, 64, 2, None),
        ((1, 8), 160, 64, 2, 30),
        ((1, 8), 192, 64, 2, None),
        ((1, 8), 512, 64, 2, None),
    ],
)
def test_on_the_gpu(operands, case, rng):
    (text, dtype), (heads, head_dim, page_size, splits, window) = operands, case
    sizes: dict[str, Any] = {"heads": heads, "head_dim": head_dim, "page_size": page_size}
    more = {"softcap": 2.0, "sinks": sinks_of(rng, heads[0] * heads[1])}
    for lengths, others in ((DECODE, {}), (CHUNKS, more)):
        test, masks = scene(rng, text, dtype, **sizes, **lengths), {"window": window, **others}
        out = kernel(*test.arguments, splits=splits, interpret=False, **masks)
        assert test.error(out, **masks) < GATES[dtype], masks


LARGE: dict[str, Any] = {"head_dim": 128, "page_size": 128}
attend = functools.partial(paged_attention, implementation="triton")


@pytest.mark.gpu
@combinations(
    1,
    text=VARIANTS,
    kind=["uniform", "outlier"],
    context=[1024, 32768],
    dtype=HALF_PRECISION,
)
def test_long_context_on_the_gpu(text, kind, context, dtype, rng):
    lengths = {"starts": [context - 1], "counts": [1]}
    test = scene(rng, text, dtype, heads=(2, 4), kind=kind, **lengths, **LARGE)
    assert test.error(jax.jit(attend)(*test.arguments)) < GATES[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("text", ["KV16", "KV4", "KV2"])
def test_half_a_million_tokens_on_the_gpu(text, rng):
    lengths = {"starts": [2**19 - 1], "counts": [1]}
    test = scene(rng, text, "bfloat16", heads=(1, 4), kind="uniform", **lengths, **LARGE)
    assert test.error(jax.jit(attend)(*test.arguments)) < GATES["bfloat16"]


@pytest.mark.gpu
@pytest.mark.parametrize("text", ["KV16", "KV8", "KV4c", "KV2"])
def test_a_long_prompt_in_chunks_on_the_gpu(text, rng):
    lengths = {"starts": [1000, 0], "counts": [300, 257]}
    test = scene(rng, text, "bfloat16", heads=(2, 4), **lengths, **LARGE)
    assert test.error(jax.jit(attend)(*test.arguments)) < GATES["bfloat16"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("text", "counts"),
    [("KV16", [300, 1, 0, 57]), ("KV8s", [1] * 4), ("KV4c", [1] * 4), ("KV2", [300, 1, 0, 57])],
)
def test_varlen_sequences_on_the_gpu(text, counts, rng):
    lengths = {"starts": [0, 900, 5, 130], "counts": counts}
    test = scene(rng, text, "bfloat16", heads=(2, 4), **lengths, **LARGE)
    out = jax.jit(attend)(test.varlen_queries(padding=3), *test.arguments[1:])
    assert test.error(test.padded(out)) < GATES["bfloat16"]


@few_formats
def test_keys_beyond_the_block_table_are_not_read(text, rng):
    """A length that the table has no pages for: what is there counts."""
    end = KVFormat.parse(text).group or 64
    test = scene(rng, text, "bfloat16", starts=[end - 4, end - 2], counts=[4, 2], page_size=64)
    longer = test.moved(starts=jnp.asarray(np.array([end - 2, end], np.int32)))
    assert test.keys.shape[1] == end
    assert longer.error(kernel(*longer.arguments, splits=2)) < GATES["bfloat16"]


@few_formats
def test_a_sequence_without_new_tokens_reads_nothing(text, rng):
    test = scene(rng, text, "bfloat16", starts=[60, 30], counts=[4, 0], page_size=64)
    out = np.asarray(kernel(*test.arguments, splits=2), np.float32)  # as in the test before
    assert (out[1] == 0).all()
    assert (out[0] != 0).any()
