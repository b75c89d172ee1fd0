"""Uses kernels without a model: a packed product, and attention over a low-bit paged KV cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mpjax.kernels import KVLayout, PagedKVCache, Span, append, matmul, paged_attention, quantize

keys = jax.random.split(jax.random.key(0), 5)

# A weight matrix [K, N] in 4 bits, with a scale and a zero point for every 128 input channels.
weight = jax.random.normal(keys[0], (1024, 512), jnp.bfloat16)
packed = quantize(weight, "uint4:g128")
x = jax.random.normal(keys[1], (3, 1024), jnp.bfloat16)
error = jnp.abs(matmul(x, packed) - x @ weight).mean() / jnp.abs(x @ weight).mean()
print(f"uint4:g128: {weight.nbytes} bytes become {packed.nbytes}, mean error {error:.1%}")

# Two sequences of 100 and 37 tokens in a cache of 8-bit pages, and attention of their last tokens.
layout = KVLayout(kv_heads=2, head_dim=64, format="KV8")
cache = PagedKVCache.create(layout, layers=1, batch=2, max_tokens=256)
key, value = (jax.random.normal(k, (2, 100, 2, 64), jnp.bfloat16) for k in keys[2:4])
counts = jnp.array([100, 37], jnp.int32)
prompts = Span(cache.block_tables, starts=cache.lengths, counts=counts)
pages = append(cache.layers[0], key, value, prompts)
query = jax.random.normal(keys[4], (2, 1, 8, 64), jnp.bfloat16)  # 4 query heads per KV head
last = Span(cache.block_tables, starts=counts - 1, counts=jnp.ones_like(counts))
attended = paged_attention(query, pages, last)
print(f"attention over {cache.nbytes} bytes of {cache.format}: {attended.shape}")
