"""Your own attention layer over a paged low-bit cache: two prompts, and decoding in one `jit`."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from mpjax.kernels import KVLayout, PagedKVCache, Rotation, Span, paged_attention, rotate_and_append

QUERY_HEADS, KV_HEADS, DIM, CHANNELS = 8, 2, 64, 256
LENGTHS, STEPS = jnp.array([100, 37], jnp.int32), 64
Weights = dict[str, jax.Array]


def attend(
    weights: Weights, x: jax.Array, counts: jax.Array, cache: PagedKVCache
) -> tuple[jax.Array, PagedKVCache]:
    """An attention layer; returns outputs of x's shape, and the cache with the new tokens.

    x: [batch, tokens, channels], of which the first counts[b] tokens of sequence b are not padding.
    """
    positions = cache.lengths[:, None] + jnp.arange(x.shape[1])[None]  # [batch, tokens]
    frequencies = 1e4 ** -(jnp.arange(0.0, DIM, 2) / DIM)
    angles = positions[..., None].astype(jnp.float32) * frequencies[None, None]
    span = Span(cache.block_tables, cache.lengths, counts)
    heads = (QUERY_HEADS, KV_HEADS)
    rotation = Rotation(jnp.cos(angles), jnp.sin(angles), heads, transform_queries=True)
    # One kernel adds the terms of the product (here a single one), rotates, quantises and appends.
    terms = (x @ weights["qkv"])[None]
    queries, pages = rotate_and_append(terms, cache.layers[0], span, rotation, dtype=x.dtype)
    attended = paged_attention(queries, pages, span, transformed=True)
    cache = dataclasses.replace(cache, layers=(pages,), lengths=cache.lengths + counts)
    return attended.reshape(*x.shape[:2], -1) @ weights["output"], cache


# The cache is donated: tokens are written into its buffers, and nothing is copied.
@functools.partial(jax.jit, donate_argnames="cache")
def decode(weights: Weights, x: jax.Array, cache: PagedKVCache) -> tuple[jax.Array, PagedKVCache]:
    """Decodes STEPS tokens of each sequence; the input of a step is the last output, normalised."""

    def step(carry, _):  # type: ignore[no-untyped-def]
        x, cache = carry
        y, cache = attend(weights, x, jnp.ones_like(cache.lengths), cache)
        y /= jnp.sqrt(jnp.square(y.astype(jnp.float32)).mean(-1, keepdims=True)).astype(y.dtype)
        return (y, cache), y[:, 0]

    (_, cache), outputs = jax.lax.scan(step, (x, cache), length=STEPS)
    return outputs, cache  # [steps, batch, channels]


def run(format: str) -> tuple[jax.Array, PagedKVCache]:
    """Outputs of the decoding steps with a cache in `format`, and that cache."""
    keys = jax.random.split(jax.random.key(0), 3)
    width = (QUERY_HEADS + 2 * KV_HEADS) * DIM
    weights = {
        "qkv": jax.random.normal(keys[0], (CHANNELS, width), jnp.bfloat16) / CHANNELS**0.5,
        "output": jax.random.normal(keys[1], (QUERY_HEADS * DIM, CHANNELS), jnp.bfloat16) / 16,
    }
    prompts = jax.random.normal(keys[2], (2, int(LENGTHS.max()), CHANNELS), jnp.bfloat16)
    layout = KVLayout(KV_HEADS, DIM, format)
    cache = PagedKVCache.create(layout, layers=1, batch=2, max_tokens=256)
    y, cache = jax.jit(attend, donate_argnames="cache")(weights, prompts, LENGTHS, cache)
    last = jnp.take_along_axis(y, LENGTHS[:, None, None] - 1, axis=1)
    return decode(weights, last, cache)


exact, _ = run("KV16")
for name in ("KV8", "KV4"):
    outputs, cache = run(name)
    first = jnp.abs(outputs[0] - exact[0]).mean() / jnp.abs(exact[0]).mean()
    print(
        f"{name}: {cache.lengths.tolist()} tokens in {cache.nbytes} bytes, "
        f"the first step is {first:.2%} from KV16's"
    )
