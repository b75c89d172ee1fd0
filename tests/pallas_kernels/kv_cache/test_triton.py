from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import KVFormat, KVLayout, KVPages, PagedKVCache, Span, device
from mpjax.kernels.kv_cache import reference, triton
from tests.pallas_kernels.kv_cache.pages import (
    Append,
    append_from_before_the_pages,
    assert_same_bits,
    ragged_append,
    random_pages,
    vectors,
)
from tests.sweeps import combinations

interpreted = jax.jit(functools.partial(triton.append, interpret=True))


@pytest.mark.parametrize(
    ("text", "dtype", "head_dim", "page_size", "tokens"),
    [
        ("KV16", "bfloat16", 96, 16, 5),
        ("K16V8", "float16", 128, 128, 1),
        ("KV8", "bfloat16", 256, 64, 1),
        ("KVfp8", "float16", 96, 256, 5),
        ("KV4", "bfloat16", 96, 32, 1),
        ("K8sV8", "float16", 96, 64, 1),
        ("K8V4", "float16", 64, 64, 5),
        ("KV4", "bfloat16", 80, 16, 1),
        ("K4V8", "float16", 512, 16, 1),
    ],
)
def test_append_bit_for_bit(text, dtype, head_dim, page_size, tokens, rng):
    pages = random_pages(
        rng,
        KVFormat.parse(text),
        pages=11,
        kv_heads=2,
        page_size=page_size,
        head_dim=head_dim,
        dtype=dtype,
    )
    new = ragged_append(rng, pages, tokens, dtype)
    written = interpreted(pages, *new.arrays())
    assert_same_bits(written, new.oracle(pages))


def test_tokens_at_negative_positions_are_not_written(rng):
    sizes = {"pages": 11, "kv_heads": 2, "page_size": 64, "head_dim": 64, "dtype": "float16"}
    pages = random_pages(rng, KVFormat.parse("K8V4"), **sizes)
    new = append_from_before_the_pages(rng, pages, "float16")
    assert_same_bits(interpreted(pages, *new.arrays()), new.oracle(pages))


@pytest.mark.parametrize("text", ["KV16", "KV8s", "KVfp8", "KV4"])
@pytest.mark.parametrize(("dtype", "tokens"), [("bfloat16", 1), ("float16", 512)])
def test_lowers_with_every_page_array_aliased(text, dtype, tokens, lower_for_cuda):
    batch, heads, dim = 4, 8, 128
    cache = jax.eval_shape(
        lambda: PagedKVCache.create(
            KVLayout(heads, dim, text, dtype=dtype),
            layers=1,
            batch=batch,
            max_tokens=4096,
            scales=1.0 if KVFormat.parse(text).scaling else None,
        )
    )
    new = jax.ShapeDtypeStruct((batch, tokens, heads, dim), dtype)
    span = Span(cache.block_tables, cache.lengths, jax.ShapeDtypeStruct((batch,), jnp.int32))
    kernel = lower_for_cuda(triton.append, cache.layers[0], new, new, span)
    assert f'name = "append_{text.lower()}"' in kernel
    arrays = 2 if text == "KV16" else 4
    assert kernel.count("#stablehlo.output_operand_alias<") == arrays
    for output in range(arrays):
        assert f"output_tuple_indices = [{output}], operand_index = {5 + output}," in kernel


@pytest.mark.parametrize(
    ("text", "head_dim", "page_size", "tokens", "programs"),
    [
        ("KV2", 96, 256, 1, 3),  # of twelve words, pieces have two
        ("K4cg64V4cg64", 96, 64, 140, None),  # of 24 words, of a prompt, pieces have twelve
        ("K16V2", 64, 16, 256, None),  # more rows would fit in a piece than in a page
        ("K16V4c", 32, 256, 128, 3),  # and than in a block
    ],
)
def test_flush_cuts_blocks_of_any_shape(text, head_dim, page_size, tokens, programs, rng):
    """Few programs encode one piece after another; else there are as many as there should be."""
    check_flush(rng, text, "bfloat16", head_dim, page_size, tokens, programs)


def check_flush(rng, text, dtype, head_dim, page_size, tokens, programs=None, sequences=4):
    """Two of four sequences complete a block, and with enough tokens the last one does."""
    format = KVFormat.parse(text)
    block, heads = format.block, 2
    assert block is not None
    entries = 3 * block // page_size
    pages = random_pages(
        rng,
        format,
        pages=sequences * entries,
        kv_heads=heads,
        page_size=page_size,
        head_dim=head_dim,
        dtype=dtype,
    )
    waiting = vectors(rng, (2, sequences, heads, block, head_dim), dtype)
    waiting = KVPages(*(jnp.asarray(x) for x in waiting), None, None, KVFormat())  # type: ignore[call-arg]
    pages = dataclasses.replace(pages, residual=waiting)
    tables = rng.permutation(sequences * entries).astype(np.int32).reshape(sequences, entries)
    starts = np.array([block, block - 1, 2 * block, 5] * (sequences // 4), np.int32)
    counts = np.array([1, 1, 1, tokens] * (sequences // 4), np.int32)
    new = (None, None)
    if tokens > 1:
        shape = (sequences, tokens, heads, head_dim)
        new = tuple(jnp.asarray(vectors(rng, shape, dtype)) for _ in range(2))
    span = Span(*(jnp.asarray(x) for x in (tables, starts, counts)), longest=tokens)
    arguments = (pages, *new, span)
    options = {} if device.on_gpu() else {"interpret": True}
    with pytest.MonkeyPatch.context() as patch:
        if programs is not None:
            patch.setattr(triton, "flush_programs", lambda *_: programs)
        written = jax.jit(functools.partial(triton.flush, **options))(*arguments)
    assert_same_bits(written, jax.jit(reference.flush)(*arguments))


@pytest.mark.gpu
@combinations(
    1,
    format=list(
        itertools.product(
            ["KV4c", "KV2", "KV2g32", "KV2t", "K4cg64V4cg64", "K8V2"], ["bfloat16", "float16"]
        )
    ),
    sizes=[(96, 256), (128, 128), (256, 64)],
    tokens=[1, 300],
)
def test_flush_bit_for_bit_on_the_gpu(format, sizes, tokens, rng):
    (text, dtype), (head_dim, page_size) = format, sizes
    if page_size % (KVFormat.parse(text).group or 1):
        page_size = 256
    check_flush(rng, text, dtype, head_dim, page_size, tokens)


@pytest.mark.gpu
@combinations(
    1,
    format=list(
        itertools.product(
            ["KV16", "KV8", "KV4", "KV4t", "KVfp8", "K8V4", "KV8s"], ["bfloat16", "float16"]
        )
    ),
    sizes=[(64, 16), (96, 256), (128, 128), (256, 64)],
    tokens=[1, 5],
)
def test_append_bit_for_bit_on_the_gpu(format, sizes, tokens, rng):
    (text, dtype), (head_dim, page_size) = format, sizes
    pages = random_pages(
        rng,
        KVFormat.parse(text),
        pages=11,
        kv_heads=3,
        page_size=page_size,
        head_dim=head_dim,
        dtype=dtype,
    )
    new = ragged_append(rng, pages, tokens, dtype)
    assert_same_bits(jax.jit(triton.append)(pages, *new.arrays()), new.oracle(pages))


@pytest.mark.gpu
@pytest.mark.parametrize("text", ["KV8", "KV4", "KVfp8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_long_prompt_bit_for_bit_and_in_place_on_the_gpu(text, dtype, rng):
    """Enough elements to meet a division or a rounding that is off in the last place."""
    pages = random_pages(
        rng, KVFormat.parse(text), pages=64, kv_heads=8, page_size=128, head_dim=128, dtype=dtype
    )
    shape = (2, 4096, 8, 128)
    new = Append(
        vectors(rng, shape, dtype),
        vectors(rng, shape, dtype),
        rng.permutation(64).astype(np.int32).reshape(2, 32),
        np.zeros(2, np.int32),
        np.full(2, 4096, np.int32),
    )
    expected = new.oracle(pages)
    pages = jax.tree.map(jnp.copy, pages)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pages)]
    written = jax.jit(triton.append, donate_argnums=0)(pages, *new.arrays())
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(written)] == pointers
    assert_same_bits(written, expected)
