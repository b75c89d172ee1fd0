from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KVFormat, KVPages, PagedKVCache


def create(**changes) -> PagedKVCache:
    arguments: dict[str, Any] = {
        "layers": 2,
        "batch": 3,
        "max_tokens": 100,
        "kv_heads": 2,
        "head_dim": 64,
        "format": KVFormat.parse("KV8"),
        "page_size": 64,
    }
    return PagedKVCache.create(**(arguments | changes))


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_parse_inverts_str(bits):
    format = KVFormat(bits)
    assert str(format) == f"KV{bits}"
    assert KVFormat.parse(str(format)) == format
    assert format.is_quantized == (bits != 16)
    assert format.planes * bits == 16


@pytest.mark.parametrize("text", ["KV", "kv8", "8", "KV8 ", "KVx", "KV-8"])
def test_parse_refuses_other_words(text):
    with pytest.raises(ValueError, match=f"can't read the KV format '{text}'"):
        KVFormat.parse(text)


@pytest.mark.parametrize("bits", [0, 2, 3, 32])
def test_only_three_widths_exist(bits):
    with pytest.raises(ValueError, match=f"KV{bits} is not a KV format"):
        KVFormat.parse(f"KV{bits}")


@pytest.mark.parametrize(
    ("text", "dtype", "storage", "width"),
    [
        ("KV16", "bfloat16", jnp.bfloat16, 64),
        ("KV16", "float32", jnp.float32, 64),
        ("KV8", "bfloat16", jnp.uint16, 32),
        ("KV4", "float16", jnp.uint16, 16),
    ],
)
def test_create(text, dtype, storage, width):
    cache = create(format=KVFormat.parse(text), dtype=dtype)
    assert (cache.page_size, cache.capacity, len(cache.layers)) == (64, 128, 2)
    np.testing.assert_array_equal(cache.lengths, [0, 0, 0])
    np.testing.assert_array_equal(cache.block_tables, [[0, 1], [2, 3], [4, 5]])
    for pages in cache.layers:
        assert (pages.page_size, pages.head_dim) == (64, 64)
        assert pages.keys.shape == pages.values.shape == (6, 2, 64, width)
        assert pages.keys.dtype == pages.values.dtype == storage
        parameters: list[Any] = [pages.key_parameters, pages.value_parameters]
        if text == "KV16":
            assert parameters == [None, None]
        else:
            assert [p.shape for p in parameters] == [(6, 2, 64)] * 2
            assert [p.dtype for p in parameters] == [jnp.uint32] * 2


@pytest.mark.parametrize(("bits", "per_token"), [(16, 256), (8, 136), (4, 72)])
def test_bytes_in_memory(bits, per_token):
    """Keys and values of 64 channels, and four bytes each of scale and zero."""
    cache = create(format=KVFormat(bits), layers=5)
    tables = 4 * (6 + 3)
    assert cache.nbytes == 5 * 6 * 64 * 2 * per_token + tables


@pytest.mark.parametrize(
    ("max_tokens", "page_size", "capacity"),
    [(1, 64, 64), (64, 64, 64), (65, 64, 128), (1, 128, 128)],
)
def test_capacity_is_rounded_up_to_pages(max_tokens, page_size, capacity):
    assert create(max_tokens=max_tokens, page_size=page_size).capacity == capacity


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 32}, r"page size 32: expected one of \(64, 128\)"),
        ({"head_dim": 66, "format": KVFormat(4)}, "KV4 needs a head dimension divisible by 4"),
        ({"max_tokens": 0}, "max_tokens is 0"),
    ],
)
def test_create_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        create(**change)


@pytest.mark.parametrize("bits", [16, 8])
def test_every_buffer_is_its_own(bits):
    cache = create(format=KVFormat(bits))
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache)]
    assert len(set(pointers)) == len(pointers)
    following = jax.jit(lambda cache: cache, donate_argnums=0)(cache)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(following)] == pointers


def test_a_cache_is_a_pytree_with_static_formats():
    cache = create()
    structure: Any
    leaves, structure = jax.tree.flatten(cache)
    assert len(leaves) == 2 * 4 + 2
    assert jax.tree.unflatten(structure, leaves).format == KVFormat(8)
    assert structure != jax.tree.structure(create(format=KVFormat(4)))
    assert isinstance(cache.layers[0], KVPages)


def test_room_is_for_the_longest_sequence():
    cache = dataclasses.replace(create(), lengths=jnp.array([0, 120, 60], jnp.int32))
    cache.require_room(8)
    cache.require_room(jnp.array([128, 8, 0]))
    message = "holds 128 tokens per sequence, but 129 are needed; create it with max_tokens=129"
    with pytest.raises(ValueError, match=message):
        cache.require_room(9)
    with pytest.raises(ValueError, match=message):
        cache.require_room(jnp.array([0, 9, 0]))
