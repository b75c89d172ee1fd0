from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import KVFormat
from pallas_kernels.kv_cache import reference
from tests.pallas_kernels.kv_cache.pages import (
    Append,
    assert_same_bits,
    ragged_append,
    random_pages,
    vectors,
)
from tests.pallas_kernels.oracles import kv_encoded, kv_words, parameter_words, wide

append = jax.jit(reference.append)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_encode_bit_for_bit_and_decode(bits, dtype, rng):
    x = vectors(rng, (3, 50, 64), dtype)
    format = KVFormat(bits)
    words, parameters = jax.jit(reference.encode, static_argnums=1)(jnp.asarray(x), format)
    codes, scale, zero = kv_encoded(x, bits)
    np.testing.assert_array_equal(words, kv_words(codes, bits))
    np.testing.assert_array_equal(parameters, parameter_words(scale, zero))
    decoded = reference.decode(words, parameters, format, jnp.dtype(dtype))
    assert decoded.dtype == jnp.float32
    expected = codes * scale.astype(np.float64)[..., None] + zero.astype(np.float64)[..., None]
    np.testing.assert_allclose(wide(decoded), expected, rtol=1e-6, atol=1e-5)


def test_sixteen_bits_are_kept_as_they_are(rng):
    x = jnp.asarray(vectors(rng, (3, 64), "bfloat16"))
    words, parameters = reference.encode(x, KVFormat(16))
    assert parameters is None
    np.testing.assert_array_equal(np.asarray(words), np.asarray(x))
    np.testing.assert_array_equal(
        reference.decode(words, None, KVFormat(16), x.dtype), x.astype(jnp.float32)
    )


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("page_size", [64, 128])
@pytest.mark.parametrize(
    ("bits", "dtype", "head_dim"),
    [(16, "bfloat16", 64), (16, "float32", 128), (8, "float16", 128), (4, "bfloat16", 64)],
)
def test_append_bit_for_bit(bits, dtype, head_dim, page_size, tokens, rng):
    pages = random_pages(
        rng,
        KVFormat(bits),
        pages=11,
        kv_heads=2,
        page_size=page_size,
        head_dim=head_dim,
        dtype=dtype,
    )
    new = ragged_append(rng, pages, tokens, dtype)
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


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_gather_reads_sequences_back_in_order(bits, rng):
    format = KVFormat(bits)
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
    gathered = reference.gather(pages, jnp.asarray(block_tables), jnp.dtype("float16"))
    for actual, x in zip(gathered, (new.keys, new.values), strict=True):
        expected = x.astype(np.float64)
        if format.is_quantized:
            codes, scale, zero = kv_encoded(x, bits)
            scale, zero = (part.astype(np.float64)[..., None] for part in (scale, zero))
            expected = codes * scale + zero
        assert actual.dtype == jnp.float32
        np.testing.assert_allclose(wide(actual), expected, rtol=1e-6, atol=1e-5)
