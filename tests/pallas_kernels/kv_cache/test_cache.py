from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import KVFormat, KVLayout, KVPages, PagedKVCache

SIZES = ("layers", "batch", "max_tokens")


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
    arguments |= changes
    fields = {field.name for field in dataclasses.fields(KVLayout)} & arguments.keys()
    layout = KVLayout(**{name: arguments.pop(name) for name in fields})
    return PagedKVCache.create(layout, **arguments)


@pytest.mark.parametrize(
    ("text", "dtype", "storage", "width"),
    [
        ("KV16", "bfloat16", jnp.bfloat16, 64),
        ("KV16", "float32", jnp.float32, 64),
        ("KV8", "bfloat16", jnp.uint16, 32),
        ("KV4", "float16", jnp.uint16, 16),
        ("KVfp8", "float16", jnp.uint16, 32),
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
            continue
        shape, kind = ((2,), jnp.float32) if text == "KVfp8" else ((6, 2, 64), jnp.uint32)
        assert [(p.shape, p.dtype) for p in parameters] == [(shape, kind)] * 2


@pytest.mark.parametrize(
    ("text", "per_token", "per_layer"),
    [("KV16", 256, 0), ("KV8", 136, 0), ("KV4", 72, 0), ("KVfp8", 128, 16), ("K16V4", 164, 0)],
)
def test_bytes_in_memory(text, per_token, per_layer):
    """Keys and values of 64 channels, and four bytes each of scale and zero, or a head's scale."""
    cache = create(format=KVFormat.parse(text), layers=5)
    tables = 4 * (6 + 3)
    assert cache.nbytes == 5 * (6 * 64 * 2 * per_token + per_layer) + tables


def test_the_format_may_be_text():
    assert jax.tree.structure(create(format="K8V4")) == jax.tree.structure(
        create(format=KVFormat(8, 4))
    )


def test_keys_and_values_of_a_format_may_differ():
    pages = create(format=KVFormat.parse("K8V4")).layers[0]
    assert (pages.keys.shape[3], pages.values.shape[3], pages.head_dim) == (32, 16, 64)
    keys, values = pages.sides
    assert (keys.codes.bits, values.codes.bits) == (8, 4)
    assert keys.words is pages.keys
    assert values.parameters is pages.value_parameters


@pytest.mark.parametrize(
    ("text", "groups", "block", "per_token"),
    [("KV4c", 1, 128, 64 + 4 + 2), ("KV2g32", 4, 256, 32 + 4 + 8), ("KV2t", None, 256, 32 + 8)],
)
def test_channels_have_scales_and_blocks_a_place_to_wait(text, groups, block, per_token):
    """Two bytes for each token's channels at 32 bits in 128 tokens."""
    cache = create(format=KVFormat.parse(text), page_size=128)
    pages = cache.layers[0]
    assert pages.key_parameters is not None
    assert pages.residual is not None
    assert pages.key_parameters.shape == ((3, 2, 128) if groups is None else (3, 2, groups, 64))
    for side in pages.residual.sides:
        assert (side.words.shape, side.words.dtype) == ((3, 2, block, 64), jnp.bfloat16)
    waiting = 2 * 3 * 2 * block * 64 * 2
    assert cache.nbytes == 2 * (3 * 2 * 128 * per_token + waiting) + 4 * (3 + 3)


@pytest.mark.parametrize(
    ("scales", "first_keys", "second_values"),
    [
        (0.5, [0.5, 0.5], [0.5, 0.5]),
        ([[[1.0], [2.0]], [[3.0], [4.0]]], [1, 1], [4, 4]),
        (np.arange(1, 9).reshape(2, 2, 2), [1, 2], [7, 8]),
    ],
)
def test_float8_has_scales_of_tensors_or_heads(scales, first_keys, second_values):
    layers = create(format=KVFormat("fp8"), scales=np.asarray(scales, np.float32)).layers
    np.testing.assert_array_equal(layers[0].key_parameters, first_keys)
    np.testing.assert_array_equal(layers[1].value_parameters, second_values)


@pytest.mark.parametrize(
    ("max_tokens", "page_size", "capacity"),
    [(1, 16, 16), (64, 64, 64), (65, 64, 128), (1, 256, 256)],
)
def test_capacity_is_rounded_up_to_pages(max_tokens, page_size, capacity):
    assert create(max_tokens=max_tokens, page_size=page_size).capacity == capacity


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({name: 0}, f"{name} is 0: expected 1 or more") for name in SIZES),
        ({"scales": 2.0}, "there are scales, but KV8 is given none: .* leave them out, or choose"),
        ({"scales": 2.0, "format": "KV16"}, "there are scales, but KV16 is given none"),
        ({"format": KVFormat("8s")}, "KV8s needs scales of channels: measure them on keys"),
        (
            {"format": KVFormat("8s"), "scales": np.ones(63, np.float32)},
            r"scales have shape \(63,\): expected what broadcasts to \(2, 2, 2, 64\), .*, head dim",
        ),
    ],
)
def test_create_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        create(**change)


@pytest.mark.parametrize("text", ["KV16", "K8Vfp8", "KV2t"])
def test_every_buffer_is_its_own(text):
    cache = create(format=KVFormat.parse(text))
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


@pytest.mark.parametrize(
    ("scales", "message"),
    [(0.0, "positive"), (np.nan, "finite"), (np.ones(3), r"shape \(3,\).* \(1, 2, 2\)")],
)
def test_scales_that_there_cannot_be(scales, message):
    with pytest.raises(ValueError, match=message):
        create(format=KVFormat("fp8"), scales=scales, layers=1, kv_heads=2)


@pytest.mark.parametrize(
    ("text", "dtype", "expected"),
    [
        ("KV8", "bfloat16", "bfloat16"),
        ("KV8", jnp.float16, "float16"),
        ("K16V4", "float32", "float16"),
        ("KV16", "bfloat16", None),
        ("KVfp8", "bfloat16", None),
    ],
)
def test_pages_know_the_dtype_of_the_scales_that_they_keep(text, dtype, expected):
    cache = create(format=KVFormat.parse(text), dtype=dtype)
    assert {pages.parameter_dtype for pages in cache.layers} == {expected}
    assert {side.parameter_dtype for side in cache.layers[0].sides} == {expected}
    other = create(
        format=KVFormat.parse(text), dtype="float16" if dtype == "bfloat16" else "bfloat16"
    )
    if expected is not None:
        assert jax.tree.structure(cache) != jax.tree.structure(other)
        message = f"KVPages: parameter_dtype is None: expected .*, what the scales of {text} are"
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(cache.layers[0], parameter_dtype=None)
