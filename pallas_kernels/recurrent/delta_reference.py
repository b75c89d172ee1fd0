"""The gated delta rule in plain jnp: one token of each sequence, or a chunk of tokens.

Arrays here are float32, with axes of key heads h, and of each key head's value heads r; a state is
[batch, h, r, K, V]. Products are in full precision, since a state is updated thousands of times.
Sources: Yang et al., Gated Delta Networks (arXiv 2412.06464); with a decay for each key channel,
Kimi Linear (arXiv 2510.26692).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from mpjax.kernels.recurrent.delta_inputs import DeltaInputs


def _product(subscripts: str, *arrays: jax.Array) -> jax.Array:
    found: jax.Array = jnp.einsum(subscripts, *arrays, precision=jax.lax.Precision.HIGHEST)
    return found


def read(state: jax.Array, tokens: DeltaInputs) -> tuple[jax.Array, jax.Array]:
    """The state after C tokens, and their outputs [batch, C, h, r, V].

    tokens: [batch, C, ...].
    """
    tokens = tokens.prepared()
    if tokens.decay.shape[1] == 1:
        state, outputs = one_token(state, jax.tree.map(lambda x: x[:, 0], tokens))
        return state, outputs[:, None]
    by_head = DeltaInputs(
        *(jnp.moveaxis(x, 1, 2) for x in (tokens.query, tokens.key)),
        *(jnp.moveaxis(x, 1, 3) for x in (tokens.value, tokens.decay, tokens.rate)),
    )
    state, outputs = _one_chunk(state, by_head)
    return state, jnp.moveaxis(outputs, 3, 1)


def one_token(state: jax.Array, token: DeltaInputs) -> tuple[jax.Array, jax.Array]:
    """The state after a token, e^g S + k (β (v − (e^g S)ᵀ k))ᵀ with the decay g and the rate β.

    token: query, key [batch, h, K], value [batch, h, r, V], decay [batch, h, r, 1 or K], and rate
        [batch, h, r].

    Also returns the outputs [batch, h, r, V]. The state is read once, for queries and keys
    together.
    """
    factor = jnp.exp(token.decay)
    both = jnp.stack([token.query, token.key], -2)[:, :, None] * factor[..., None, :]
    asked, known = jnp.moveaxis(_product("bhrik,bhrkv->bhriv", both, state), -2, 0)
    error = token.rate[..., None] * (token.value - known)
    overlap = jnp.sum(token.query * token.key, -1)[..., None, None]
    state = factor[..., None] * state + token.key[..., None, :, None] * error[..., None, :]
    return state, asked + overlap * error


def _one_chunk(state: jax.Array, chunk: DeltaInputs) -> tuple[jax.Array, jax.Array]:
    """The state after C tokens, and their outputs [batch, h, r, C, V].

    chunk: query, key [batch, h, C, K], value [batch, h, r, C, V], decay [batch, h, r, C, 1 or K],
        and rate [batch, h, r, C].

    Row i of D, the update that token i writes for its key, solves (I + A) D = β (V − e^G K S). A is
    the strictly lower part of β (K Kᵀ) ⊙ Γ, where Γ[i, j] is the decay after token j up to token i.
    """
    size = chunk.rate.shape[-1]
    lower = jnp.tril(jnp.ones((size, size)))
    if chunk.decay.shape[-1] > 1:
        return _one_chunk_by_channel(state, chunk, lower)
    chunk = dataclasses.replace(chunk, decay=chunk.decay[..., 0])
    # The log-decay between two tokens is summed directly: a difference of prefix sums cancels
    # catastrophically after a token with a very large decay.
    after = chunk.decay[..., None] * jnp.tril(lower, -1)[None, None, None]
    between = jnp.exp(_product("im,bhrmj->bhrij", lower, after)) * lower[None, None, None]
    begun = jnp.exp(jnp.cumsum(chunk.decay, -1))[..., None]
    keys = _product("bhik,bhjk->bhij", chunk.key, chunk.key)[:, :, None]
    asked = _product("bhik,bhjk->bhij", chunk.query, chunk.key)[:, :, None]
    rate = chunk.rate[..., None]
    known = _product("bhck,bhrkv->bhrcv", chunk.key, state)
    solve = inverse(rate * keys * between)
    written = _product("bhrij,bhrjv->bhriv", solve, rate * (chunk.value - begun * known))
    outputs = begun * _product("bhck,bhrkv->bhrcv", chunk.query, state)
    outputs += _product("bhrij,bhrjv->bhriv", asked * between, written)
    left = between[..., -1, :, None] * written
    state = begun[..., -1:, :] * state + _product("bhck,bhrcv->bhrkv", chunk.key, left)
    return state, outputs


def _one_chunk_by_channel(
    state: jax.Array, chunk: DeltaInputs, lower: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`_one_chunk` with decays of key channels, which are factors inside the products over K.

    lower: [C, C], ones up to the diagonal.
    """
    after = chunk.decay[..., None, :] * jnp.tril(lower, -1)[None, None, None, ..., None]
    between = jnp.exp(jnp.cumsum(after, -3)) * lower[None, None, None, ..., None]
    begun = jnp.exp(jnp.cumsum(chunk.decay, -2))
    query, key = chunk.query[:, :, None], chunk.key[:, :, None]
    later, asking = (jnp.broadcast_to(x, begun.shape) for x in (key, query))
    known_by = between * key[..., None, :, :]
    keys = _product("bhrik,bhrijk->bhrij", later, known_by)
    asked = _product("bhrik,bhrijk->bhrij", asking, known_by)
    rate = chunk.rate[..., None]
    known = _product("bhrck,bhrkv->bhrcv", key * begun, state)
    written = _product("bhrij,bhrjv->bhriv", inverse(rate * keys), rate * (chunk.value - known))
    outputs = _product("bhrck,bhrkv->bhrcv", query * begun, state)
    outputs += _product("bhrij,bhrjv->bhriv", asked, written)
    left = between[..., -1, :, :] * key
    state = begun[..., -1, :, None] * state + _product("bhrck,bhrcv->bhrkv", left, written)
    return state, outputs


def inverse(lower: jax.Array) -> jax.Array:
    """The inverse of I + A for the strictly lower part A of [..., C, C]; C is a power of two.

    Inverses of diagonal blocks are combined to those of blocks twice as large. A Neumann series
    would overflow float32 for repeated keys.
    """
    *leading, size, _ = lower.shape
    found, block = jnp.ones((*leading, size, 1, 1)), 1
    while block < size:
        pairs = size // (2 * block)
        blocks = lower.reshape(*leading, pairs, 2 * block, pairs, 2 * block)
        below = jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)[..., block:, :block]
        found = found.reshape(*leading, pairs, 2, block, block)
        first, second = found[..., 0, :, :], found[..., 1, :, :]
        across = -_product("...ij,...jk,...kl->...il", second, below, first)
        upper = jnp.concatenate([first, jnp.zeros_like(first)], -1)
        found = jnp.concatenate([upper, jnp.concatenate([across, second], -1)], -2)
        block *= 2
    return found[..., 0, :, :]
