"""Formats, layouts and caches."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import KVFormat, KVLayout, PagedKVCache

KINDS = (16, 8, 4, "fp8", "8s")
GIVEN = {"fp8": "head", "8s": "static"}


@pytest.mark.parametrize(("keys", "values"), list(itertools.product(KINDS, KINDS)))
def test_parse_inverts_str(keys, values):
    if {keys, values} == set(GIVEN):
        with pytest.raises(ValueError, match="scales are given for heads or for channels"):
            KVFormat(keys, values)
        return
    format = KVFormat(keys, values)
    assert str(format) == (f"KV{keys}" if keys == values else f"K{keys}V{values}")
    assert KVFormat.parse(str(format)) == format
    assert KVFormat.parse(f"K{keys}V{values}") == format
    for codes, kind in ((format.key_codes, keys), (format.value_codes, values)):
        assert codes.bits == (8 if kind in GIVEN else kind)
        assert codes.has_given_scales == (kind in GIVEN)
        assert codes.is_quantized == (kind != 16)
        assert codes.planes * codes.bits == 16
    assert format.scaling == GIVEN.get(keys, GIVEN.get(values))


@pytest.mark.parametrize(
    "text", ["KV", "8", "KV8 .", "KVx", "KV-8", "K8", "K8KV8", "KFP8", "K8V4C4"]
)
def test_parse_refuses_other_words(text):
    with pytest.raises(ValueError, match=f"can't read the KV format '{text}'"):
        KVFormat.parse(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 48}, r"page size 48: expected one of \(16, 32, 64, 128, 256\)"),
        ({"head_dim": 66, "format": KVFormat(4)}, "KV4 needs a head dimension divisible by 4"),
        ({"format": "KV4c"}, "page size 64: KV4c needs a multiple of 128"),
        ({"format": "KV9"}, "KV9 is not a KV format"),
        ({"dtype": "int8"}, "KVLayout: dtype is 'int8': expected a dtype"),
        *(({name: 0}, f"{name} is 0: expected 1 or more") for name in ("kv_heads", "head_dim")),
    ],
)
def test_what_there_cannot_be_is_refused(change, message):
    fields = {"kv_heads": 2, "head_dim": 64, "page_size": 64} | change
    with pytest.raises(ValueError, match=message):
        KVLayout(**fields)


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


def test_room_is_for_the_longest_sequence():
    cache = dataclasses.replace(create(), lengths=jnp.array([0, 120, 60], jnp.int32))
    cache.require_room(8)
    cache.require_room(jnp.array([128, 8, 0]))
    message = "holds 128 tokens per sequence, but 129 are needed; create it with max_tokens=129"
    with pytest.raises(ValueError, match=message):
        cache.require_room(9)
    with pytest.raises(ValueError, match=message):
        cache.require_room(jnp.array([0, 9, 0]))
