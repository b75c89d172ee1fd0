"""Whole sequences that attend through pages of a KV format, which are made for the call.

In deterministic mode a forward pass without a cache has to compute what steps with a cache compute,
so it rotates, appends and attends by the same kernels. Derivatives are those of attention to keys
and values as they are: rounding to the KV format counts as the identity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.kernels import KVFormat, KVPages, Span
from mpjax.kernels.gradients import with_gradients_of
from mpjax.models.kv_state import KVState
from mpjax.models.state import Room, StepContext

if TYPE_CHECKING:
    from mpjax.models.attention import Attention

PAGE_SIZE = 128


def attend(
    attention: Attention, terms: jax.Array, context: StepContext, dtype: jnp.dtype
) -> jax.Array:
    """Attention without a cache as with one: [batch, tokens, heads, head dim] in `dtype`.

    terms: [splits, batch, tokens, channels], whose sum is queries, keys and values, concatenated.
    """
    rest = nnx.clone(attention)
    del rest.qkv, rest.output
    graph, parameters = nnx.split(rest)

    def through_pages(terms: jax.Array, parameters: nnx.State, context: StepContext) -> jax.Array:
        module = nnx.merge(graph, parameters)
        state = KVState(module.heads[1], module.head_dim, jnp.dtype(dtype).name, None)
        pages, span = empty(state, context.kv_format, terms.shape[1:3])
        found, _ = module.over_cache(terms, context, pages, span, dtype)
        assert isinstance(found, jax.Array)  # without blocks it is not rounded
        return found

    def plainly(terms: jax.Array, parameters: nnx.State, context: StepContext) -> jax.Array:
        module = nnx.merge(graph, parameters)
        product = terms.astype(jnp.float32).sum(0).astype(dtype)
        queries, keys = (heads * module.head_dim for heads in module.heads)
        parts = jnp.split(product, [queries, queries + keys], axis=-1)
        if module.keys_as_values:
            parts[2] = parts[1]
        found: jax.Array = module.over_prompt(parts, context)[0]
        return found

    return with_gradients_of(plainly, through_pages, terms, parameters, context)


def empty(state: KVState, format: KVFormat | None, shape: tuple[int, ...]) -> tuple[KVPages, Span]:
    """Empty pages of sequences of shape [batch, tokens], and the span of all their tokens."""
    assert format is not None
    batch, tokens = shape
    entries = -(-tokens // PAGE_SIZE)
    pages = state.create(Room(batch * entries, batch, format, PAGE_SIZE), None)
    tables = jnp.arange(batch * entries, dtype=jnp.int32).reshape(batch, entries)
    starts = jnp.zeros(batch, jnp.int32)
    return pages, Span(tables, starts, jnp.full(batch, tokens, jnp.int32))
