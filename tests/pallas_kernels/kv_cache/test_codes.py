"""Codes of keys and values, their scales, and the Hadamard transform."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import KVFormat, KVLayout, PagedKVCache, Span, append, cache_scales
from mpjax.kernels.kv_cache import hadamard, reference
from mpjax.kernels.kv_cache.codes import KEY_KINDS, VALUE_KINDS, KVCodes
from mpjax.kernels.kv_cache.writing import lanes, targets
from mpjax.kernels.target import PLAIN, tracing_for
from tests.pallas_kernels import oracles
from tests.pallas_kernels.kv_cache.pages import vectors
from tests.pallas_kernels.numpy_ptx import NumpyPTX
from tests.pallas_kernels.oracles import KEY_GROUPS, kv_channels, kv_side, wide

SCALE = np.array([[0.25], [1.0], [3.0]], np.float32)  # of three heads
CHANNEL_SCALE = SCALE * np.linspace(0.5, 2, 64, dtype=np.float32)
GIVEN = {"fp8": SCALE, "8s": CHANNEL_SCALE}


@functools.partial(jax.jit, static_argnums=(1, 2))
def encode(x: jax.Array, codes: KVCodes, pieces: int) -> tuple[jax.Array, jax.Array | None]:
    scales = None
    if codes.has_given_scales:
        given = SCALE if codes.scaling == "head" else CHANNEL_SCALE
        scales = np.split(np.broadcast_to(given, CHANNEL_SCALE.shape), pieces, -1)
        scales = [jnp.asarray(scale)[None] for scale in scales]
    kept = jnp.float16 if x.dtype == jnp.float32 else x.dtype
    slices, parameters = codes.encode(jnp.split(x, pieces, -1), scales, kept)
    assert len(slices) == pieces // codes.planes
    return jnp.concatenate(slices, -1), jnp.concatenate(parameters, -1) if parameters else None


@functools.partial(jax.jit, static_argnums=(0, 3))
def decode(codes: KVCodes, words: jax.Array, parameters: Any, dtype: str) -> jax.Array:
    return codes.decode(words, parameters, dtype)


@pytest.mark.parametrize(
    ("kind", "dtype", "pieces"),
    [
        ("16", "float32", 8),
        ("8", "bfloat16", 8),
        ("8", "float32", 8),
        ("8s", "float16", 16),
        ("4", "bfloat16", 8),
        ("4", "float16", 16),
        ("2", "float16", 16),
        ("2", "float32", 8),
        ("fp8", "bfloat16", 8),
        ("fp8", "float32", 8),
    ],
)
def test_encode_bit_for_bit_and_decode(kind, dtype, pieces, rng):
    """Words are the same from one piece for each of their codes, or from more."""
    x = vectors(rng, (40, 3, 64), dtype)
    words, parameters = encode(jnp.asarray(x), VALUE_KINDS[kind], pieces)
    side = kv_side(x, kind, GIVEN.get(kind))
    np.testing.assert_array_equal(np.asarray(words), side.words)
    assert (parameters is None) == (side.parameters is None)
    if parameters is not None:
        np.testing.assert_array_equal(parameters[..., 0], side.parameters)
    given = jnp.asarray(GIVEN[kind])[None] if kind in GIVEN else parameters
    kept = "float16" if dtype == "float32" else dtype
    decoded = decode(VALUE_KINDS[kind], words, given, kept)
    assert decoded.dtype == jnp.float32
    np.testing.assert_allclose(wide(decoded), side.decoded, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "dtype", "pieces"),
    [("4c", "bfloat16", 8), ("4c", "float32", 8), ("2g32", "float16", 16)],
)
def test_channels_bit_for_bit(kind, dtype, pieces, rng):
    """Groups of tokens of two heads; the channel with the outliers costs the others nothing."""
    group = KEY_GROUPS[kind]
    x = vectors(rng, (3, 2, group, 64), dtype)  # [groups, heads, tokens, dim]
    x[..., 5:7] = 0.7, 0
    words, parameters = encode(jnp.asarray(x), KEY_KINDS[kind], pieces)
    side = kv_channels(x, kind)
    np.testing.assert_array_equal(np.asarray(words), side.words)
    np.testing.assert_array_equal(parameters, side.parameters)
    kept = "float16" if dtype == "float32" else dtype
    decoded = decode(KEY_KINDS[kind], words, parameters, kept)
    np.testing.assert_allclose(wide(decoded), side.decoded, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("kind", ["8", "8s", "4", "4c", "2", "fp8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("target", [PLAIN, NumpyPTX()], ids=["twin", "ptx"])
def test_operands_are_the_codes_exactly(kind, dtype, target):
    """On all words, without the bytes that e4m3 takes for NaN."""
    codes = VALUE_KINDS[kind]
    words = np.arange(2**16, dtype=np.uint16)
    for plane in range(codes.planes):
        fields = words >> (plane * codes.bits) & (2**codes.bits - 1)
        if kind == "fp8":
            ones = np.ones((1, 1), np.float32)
            expected = wide(codes.decode(jnp.asarray(words[:, None]), ones, dtype))[:, plane]
            real = fields & 0x7F != 0x7F
        else:
            middle = {"8": 127.5, "4": 7.5, "2": 1.5}.get(kind, 0) if dtype == "float16" else 0
            offset = 128 if kind == "8s" else middle
            assert codes.offset(dtype) == offset
            expected, real = fields - float(offset), np.ones_like(words, bool)
        with tracing_for(target):
            found = codes.operand(jnp.asarray(words), plane, dtype)
            in_units = np.ldexp(expected, codes.exponent(plane, dtype))
        assert found.dtype == dtype
        np.testing.assert_array_equal(np.asarray(found).astype(np.float64)[real], in_units[real])


def test_float8_beyond_the_range_is_its_end():
    x = jnp.asarray(np.array([[[1e9, -1e9, 449.0, -460.0]]], np.float32))
    scale = jnp.ones((1, 1, 1))
    [words], _ = VALUE_KINDS["fp8"].encode(jnp.split(x, 2, -1), [scale] * 2, None)
    np.testing.assert_array_equal(
        VALUE_KINDS["fp8"].decode(words, scale, None), [[[448, -448, 448, -448]]]
    )


transform = jax.jit(hadamard.transform)
transform_pieces = jax.jit(hadamard.transform_pieces, static_argnums=(1, 2))


@pytest.mark.parametrize(
    ("dim", "dtype", "counts"),
    [
        (64, "bfloat16", (2, 8)),
        (96, "float16", (1, 4)),
        (96, "bfloat16", (2, 8)),
        (128, "float16", (1, 4)),
        (256, "bfloat16", (8,)),
    ],
)
def test_pieces_bit_for_bit_and_the_product_nearly(dim, dtype, counts, rng):
    """One piece as it is, and several at their lanes, of which some hold a channel again."""
    x = vectors(rng, (50, dim), dtype)
    expected = oracles.hadamard(x)
    found = transform(x)
    assert found.dtype == dtype
    size = np.abs(wide(x)).max(-1, keepdims=True)
    assert (np.abs(wide(found) - wide(expected)) <= size * 2.0**-6).all()

    for count in counts:
        width = dim // count
        pieces = [x[:, i * width + np.asarray(lanes(width))] for i in range(count)]
        if count == 1:
            pieces = [x]
        parts = transform_pieces(pieces, dim, dtype)
        target, is_first = np.arange(dim), np.ones(dim, bool)
        if count > 1:
            target, is_first = (np.asarray(part) for part in targets(width))
        assert len(set(target.tolist())) == len(target)
        for i, part in enumerate(parts):
            whole = np.empty((len(x), width))
            whole[:, target[is_first]] = wide(part)[:, is_first]
            np.testing.assert_array_equal(whole, wide(expected)[:, i * width : (i + 1) * width])


@pytest.mark.parametrize("text", ["KV8s", "KVfp8"])
@pytest.mark.parametrize("value", [0, 1e-37, 1e-38, 1e-40])
def test_what_is_too_small_for_a_scale_has_one_that_the_cache_takes(value, text):
    scales = cache_scales(jnp.full((3, 2, 4), value), text)
    np.testing.assert_array_equal(scales, 1)
    PagedKVCache.create(
        KVLayout(2, 4, text),
        layers=1,
        batch=1,
        max_tokens=16,
        scales=jnp.stack([scales, scales])[None],
    )


def test_what_they_were_measured_on_is_off_by_half_a_step(rng):
    """The way of a researcher: measure, create, append; channels of all sizes."""
    x = rng.standard_normal((2, 2, 40, 3, 64)) * 10 ** rng.uniform(-2, 2, 64)
    keys, values = jnp.asarray(x.astype(np.float32))
    format = KVFormat.parse("KV8s")
    scales = jnp.stack([cache_scales(keys, format), cache_scales(values, format)])
    cache = PagedKVCache.create(
        KVLayout(3, 64, format), layers=1, batch=2, max_tokens=64, scales=scales
    )
    counts = jnp.full(2, 40, jnp.int32)
    write = jax.jit(append)
    pages = write(cache.layers[0], keys, values, Span(cache.block_tables, cache.lengths, counts))
    found = jax.jit(reference.gather)(pages, cache.block_tables)
    for side, stored, scale in zip((keys, values), found, wide(scales), strict=True):
        error = np.abs(wide(stored)[:, :40] - wide(side))
        assert (error <= scale * (0.5 + 1e-5)).all()
