"""The state of a benchmark's case: with an empty cache, a filled one, and after its prompt."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import mpjax
from mpjax.bench import filled_pages
from mpjax.decoding_state import STRIDE, DecodingState, Limits
from mpjax.memory import require_free_on
from mpjax.models import Decoder
from mpjax.random_keys import row_keys
from mpjax.sampling import Sampling


def empty_state(lm: mpjax.LanguageModel, batch: int, max_tokens: int, room: int) -> DecodingState:
    """A state with an empty cache, in the KV format and pages of `lm`, before its first token.

    batch: rows. max_tokens: of a row in the cache. room: new tokens of a row.

    Raises DeviceMemoryError if a device has no room for the cache.
    """
    create = functools.partial(lm.model.create_cache, batch, max_tokens, lm.kv_format, lm.page_size)
    shape = jax.tree.leaves(jax.eval_shape(create))
    needed = sum(leaf.size * leaf.dtype.itemsize for leaf in shape)
    what = f"a {lm.kv_format} cache for {batch} × {max_tokens} tokens"
    require_free_on(lm.model.mesh, needed, what)
    return DecodingState(
        cache=create(),
        keys=row_keys(range(batch)),
        tokens=jnp.zeros((batch, room), jnp.int32),
        logprobs=jnp.zeros((batch, room), jnp.float32),
        counts=jnp.zeros(batch, jnp.int32),
        finished=jnp.zeros(batch, bool),
        seen=None,
        step=jnp.int32(0),
    )


def fill(state: DecodingState, tokens: int, mesh: jax.sharding.Mesh | None = None) -> DecodingState:
    """Fills every layer of a state's cache with `tokens` random keys and values for each row."""
    cache = state.cache
    layers = tuple(
        filled_pages.fill(pages, cache.block_tables, tokens, seed, mesh)
        for seed, pages in enumerate(cache.layers)
    )
    cache = jax.block_until_ready(dataclasses.replace(cache, layers=layers))
    return dataclasses.replace(state, cache=cache)


def rewind(state: DecodingState, tokens: int) -> DecodingState:
    """The state after `tokens` prompt tokens and the first new one, to decode from there again.

    Only lengths and counts are set, from the host, so that no kernel runs and is counted. Later
    tokens in the cache will be overwritten. A residual still holds later tokens: with such formats
    the times of the next round are right, but the generated tokens are not.
    """
    batch = len(state.tokens)
    return dataclasses.replace(
        state,
        cache=dataclasses.replace(state.cache, lengths=from_host(np.full(batch, tokens, np.int32))),
        counts=from_host(np.ones(batch, np.int32)),
        finished=from_host(np.zeros(batch, bool)),
        step=from_host(np.int32(1)),
    )


def from_host(array: np.ndarray | np.generic) -> jax.Array:
    """An array of the device, copied from the host without a kernel."""
    return jax.device_put(array)


class CaseDecoding:
    """A model with the state of a case after its prompt; each call goes on from there.

    Calls donate the state, and keep the one that they return. prompt: tokens of a row.
    """

    def __init__(self, model: Decoder, state: DecodingState, prompt: int, limits: Limits) -> None:
        self.model, self.state, self.prompt, self.limits = model, state, prompt, limits

    def act(self, generate: Callable[[DecodingState], DecodingState]) -> None:
        """Calls a function with the state after the prompt, and keeps the state it returns."""
        self.state = generate(rewind(self.state, self.prompt))

    def run(self, program: Callable[..., DecodingState], until: jax.Array) -> jax.Array:
        """Runs a program of `decode` until a step; returns the tokens, to wait for."""
        self.act(
            lambda state: program(self.model, state, Sampling(), self.limits, until, stride=STRIDE)
        )
        return self.state.tokens
