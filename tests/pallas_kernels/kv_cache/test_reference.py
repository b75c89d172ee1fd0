from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpjax.kernels import KVFormat
from mpjax.kernels.kv_cache import reference
from tests.pallas_kernels.kv_cache.pages import (
    Append,
    append_from_before_the_pages,
    assert_same_bits,
    given_scale,
    ragged_append,
    random_pages,
    vectors,
)
from tests.pallas_kernels.oracles import kv_key, kv_side, wide

append = jax.jit(reference.append)
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
    assert_same_bits(append(pages, *new.arrays()), new.oracle(pages))


def test_tokens_at_negative_positions_are_not_written(rng):
    sizes = {"pages": 11, "kv_heads": 2, "page_size": 64, "head_dim": 128, "dtype": "float16"}
    pages = random_pages(rng, KVFormat(8), **sizes)
    new = append_from_before_the_pages(rng, pages, "float16")
    assert_same_bits(append(pages, *new.arrays()), new.oracle(pages))


@settings(max_examples=20)
@given(st.data())
def test_append_anywhere(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    pages = random_pages(
        rng, KVFormat(8), pages=6, kv_heads=1, page_size=64, head_dim=64, dtype="bfloat16"
    )
    shape = (2, 4, 1, 64)
    new = Append(
        vectors(rng, shape, "bfloat16"),
        vectors(rng, shape, "bfloat16"),
        rng.permutation(6).astype(np.int32).reshape(2, 3),
        np.array(data.draw(st.tuples(*[st.integers(0, 200)] * 2)), np.int32),
        np.array(data.draw(st.tuples(*[st.integers(0, 4)] * 2)), np.int32),
    )
    assert_same_bits(append(pages, *new.arrays()), new.oracle(pages))


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
    pages = append(pages, *new.arrays())
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
