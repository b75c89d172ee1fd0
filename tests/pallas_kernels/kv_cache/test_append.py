"""Appending tokens by the public function and by the reference."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mpjax.kernels import KVFormat, KVLayout, PagedKVCache, Span, UnsupportedError, append
from mpjax.kernels.kv_cache import api, reference, varlen
from tests.pallas_kernels.kv_cache.pages import (
    Append,
    append_from_before_the_pages,
    assert_same_bits,
    given_scale,
    ragged_append,
    random_pages,
    vectors,
)
from tests.pallas_kernels.oracles import as_array, kv_key, kv_side, relative_error, wide


def pages_of(rng, bits=8, dtype="bfloat16", head_dim=64):
    return random_pages(
        rng, KVFormat(bits), pages=8, kv_heads=2, page_size=64, head_dim=head_dim, dtype=dtype
    )


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_implementations_agree(implementation, rng, interpreted_triton):
    pages = pages_of(rng)
    new = ragged_append(rng, pages, 2, "bfloat16")
    write = functools.partial(append, implementation=implementation)
    written = jax.jit(write)(pages, *new.arrays())
    assert_same_bits(written, new.oracle(pages))


@pytest.mark.parametrize(("implementation", "longest"), [("triton", 3), ("reference", None)])
def test_tokens_can_be_varlen(implementation, longest, rng, interpreted_triton):
    """Four of them, of which one adds nothing and one runs past its end, and then padding."""
    pages = pages_of(rng)
    new = ragged_append(rng, pages, 3, "bfloat16")
    keys, values = (
        jnp.asarray(np.concatenate([*(x[b, :n] for b, n in enumerate(new.counts)), x[0, :2]]))
        for x in (new.keys, new.values)
    )
    write = functools.partial(append, implementation=implementation)
    written = jax.jit(write)(pages, keys, values, dataclasses.replace(new.span(), longest=longest))
    assert_same_bits(written, new.oracle(pages))


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ((4, 1, 3, 64), (4, 1, 3, 64)),
        ((4, 1, 2, 32), (4, 1, 2, 32)),
        ((4, 1, 2, 64), (4, 2, 2, 64)),
        ((4, 3, 64), (4, 3, 64)),
        ((2, 64), (2, 64)),
    ],
)
def test_keys_and_values_must_fit_the_pages(keys, values, rng):
    span = Span(jnp.zeros((4, 2), jnp.int32), jnp.zeros(4, jnp.int32), jnp.ones(4, jnp.int32))
    message = r"must be \[batch, tokens, 2, 64\], the KV heads and head dimension of the pages"
    with pytest.raises(ValueError, match=message):
        append(pages_of(rng), jnp.zeros(keys), jnp.zeros(values), span)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"bits": 16, "dtype": "float32"}, "pages of float32 are not 16 bits wide"),
        ({"head_dim": 72}, f"head dimension 72 is not one of {api.HEAD_DIMS}"),
    ],
)
def test_what_the_kernel_cannot_do_goes_to_the_reference(changes, reason, rng, pretend_gpu):
    pages = pages_of(rng, **changes)
    new = ragged_append(rng, pages, 2, changes.get("dtype", "bfloat16"))
    assert api.why_not_triton(pages) == reason
    written = jax.jit(append)(pages, *new.arrays())
    assert_same_bits(written, new.oracle(pages))
    with pytest.raises(UnsupportedError, match=re.escape(reason)):
        append(pages, *new.arrays(), implementation="triton")


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("text", "dtype", "of_keys", "implementation"),
    [
        ("KV8", "float16", "float32", "reference"),
        ("KV4c", "bfloat16", "float16", "triton"),
        ("KV4c", "float16", "bfloat16", "reference"),
    ],
)
def test_scales_have_the_dtype_of_the_cache(
    text, dtype, of_keys, implementation, rng, interpreted_triton
):
    """Whatever that of keys and values is; of the two blocks that there are, one waits."""
    cache = PagedKVCache.create(
        KVLayout(1, 64, KVFormat.parse(text), dtype=dtype), layers=1, batch=1, max_tokens=256
    )
    new = rng.standard_normal((2, 1, 130, 1, 64))
    write = functools.partial(append, implementation=implementation)
    span = Span(cache.block_tables, jnp.zeros(1, jnp.int32), jnp.full(1, 130, jnp.int32))
    keys, values = as_array(new, of_keys)
    pages = jax.jit(write)(cache.layers[0], keys, values, span)
    assert jax.tree.structure(pages) == jax.tree.structure(cache.layers[0])
    found = jax.jit(reference.gather)(pages, cache.block_tables, jnp.full(1, 130, jnp.int32))
    for side, expected in zip(found, new, strict=True):
        assert relative_error(side[:, :130], expected) < (0.15 if text == "KV4c" else 0.01)


append_plainly = jax.jit(reference.append)
gather = jax.jit(reference.gather)


@pytest.mark.parametrize(
    ("text", "dtype", "head_dim", "page_size", "tokens"),
    [
        ("KV16", "bfloat16", 64, 64, 1),
        ("K16V4", "float32", 128, 128, 5),
        ("KV8", "float16", 128, 64, 5),
        ("KV8", "bfloat16", 64, 128, 1),
        ("KVfp8", "bfloat16", 64, 64, 5),
        ("KV8s", "bfloat16", 64, 128, 1),
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
    assert_same_bits(append_plainly(pages, *new.arrays()), new.oracle(pages))


def test_tokens_at_negative_positions_are_not_written(rng):
    sizes = {"pages": 11, "kv_heads": 2, "page_size": 64, "head_dim": 128, "dtype": "float16"}
    pages = random_pages(rng, KVFormat(8), **sizes)
    new = append_from_before_the_pages(rng, pages, "float16")
    assert_same_bits(append_plainly(pages, *new.arrays()), new.oracle(pages))


# Not bfloat16 for KV16: to scatter it on a CPU, XLA widens all pages to float32 and back.
@pytest.mark.parametrize(("bits", "dtype"), [(16, "float32"), (8, "bfloat16"), (4, "bfloat16")])
def test_donated_pages_are_written_in_place(bits, dtype, rng):
    pages = random_pages(
        rng, KVFormat(bits), pages=8, kv_heads=2, page_size=64, head_dim=64, dtype=dtype
    )
    pages = jax.tree.map(jnp.copy, pages)  # numpy's own buffers can't be donated
    new = ragged_append(rng, pages, 3, dtype)
    expected = new.oracle(pages)
    compiled = jax.jit(reference.append, donate_argnums=0).lower(pages, *new.arrays()).compile()
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pages)]
    written = compiled(pages, *new.arrays())
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(written)] == pointers
    assert_same_bits(written, expected)
    whole = 8 * 2 * 64 * 64 * bits // 8
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < whole, "the pages are copied"


@pytest.mark.parametrize("text", ["KV16", "KVfp8", "K8V4", "K8sV8", "K4V8s"])
def test_gather_reads_sequences_back_in_order(text, rng):
    format = KVFormat.parse(text)
    pages = random_pages(
        rng, format, pages=6, kv_heads=3, page_size=64, head_dim=64, dtype="float16"
    )
    block_tables = rng.permutation(6).astype(np.int32).reshape(2, 3)
    shape = (2, 192, 3, 64)
    new = Append(
        vectors(rng, shape, "float16"),
        vectors(rng, shape, "float16"),
        block_tables,
        np.zeros(2, np.int32),
        np.full(2, 192, np.int32),
    )
    pages = append_plainly(pages, *new.arrays())
    gathered = gather(pages, jnp.asarray(block_tables))
    for actual, oracle, x, kind, scale in zip(
        gathered,
        (kv_key, kv_side),
        (new.keys, new.values),
        (format.keys, format.values),
        (pages.key_parameters, pages.value_parameters),
        strict=True,
    ):
        assert actual.dtype == jnp.float32
        expected = oracle(x, str(kind), given_scale(scale, kind)).decoded
        np.testing.assert_allclose(wide(actual), expected, rtol=1e-6, atol=1e-5)


@settings(max_examples=20)
@example(counts=[5, 5, 5, 5], tokens=20)
@example(counts=[3], tokens=3)
@given(st.lists(st.integers(0, 5), min_size=4, max_size=4), st.sampled_from([20, 23]))
def test_tokens_of(counts, tokens):
    owners = [(b, t) for b, count in enumerate(counts) for t in range(count)]
    found = varlen.tokens_of(np.array(counts, np.int32), tokens)
    assert found.is_real.tolist() == [True] * len(owners) + [False] * (tokens - len(owners))
    pairs = zip(found.sequence.tolist(), found.number.tolist(), strict=True)
    assert list(pairs)[: len(owners)] == owners
    assert found.sequence.max() < len(counts)
