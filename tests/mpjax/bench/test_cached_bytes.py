from __future__ import annotations

import jax.numpy as jnp
import pytest

from mpjax.bench.cached_bytes import cached_bytes, moved_bytes
from mpjax.kernels import KVLayout, PagedKVCache

HEADS, DIM = 2, 64
PAIR, WORD = 4, 2  # bytes of a scale with its zero, and of a 16-bit number
CHANNELS = HEADS * DIM
GIVEN = 2 * HEADS * 4  # FP8's scales, of keys' and values' heads


@pytest.mark.parametrize(
    ("text", "lengths", "expected"),
    [
        ("KV16", [5, 300], 305 * 2 * CHANNELS * WORD),
        ("KV8", [5, 300], 305 * 2 * (CHANNELS + HEADS * PAIR)),
        ("KV4", [0, 1], 2 * (CHANNELS // 2 + HEADS * PAIR)),
        ("KVfp8", [5, 300], 305 * 2 * CHANNELS + GIVEN),
        # Keys' scales are of 128 tokens each, and values' of every token; the rest waits.
        ("KV2", [256, 100], 356 * 2 * CHANNELS * WORD),
        (
            "KV2",
            [257, 512],
            512 * 2 * CHANNELS // 4
            + 4 * CHANNELS * PAIR
            + 512 * HEADS * PAIR
            + (1 + 256) * 2 * CHANNELS * WORD,
        ),
        ("K4cV4c", [129], 128 * CHANNELS + 2 * CHANNELS * PAIR + 2 * CHANNELS * WORD),
    ],
)
def test_bytes_are_those_that_sequences_have(text, lengths, expected):
    cache = PagedKVCache.create(
        KVLayout(HEADS, DIM, text),
        layers=1,
        batch=len(lengths),
        max_tokens=1024,
        scales=1.0 if text == "KVfp8" else None,
    )
    assert cached_bytes(cache.layers[0], lengths) == expected


def test_a_state_of_each_sequence_is_read_and_written():
    pages = PagedKVCache.create(KVLayout(HEADS, DIM), layers=1, batch=2, max_tokens=64).layers[0]
    read = cached_bytes(pages, [5, 30])
    assert moved_bytes((jnp.zeros((2, 3, 4)), pages), [5, 30]) == read + 2 * 2 * 3 * 4 * 4
