"""A benchmark's generation loop: with an empty or filled cache, or after prefill."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np

import mpjax
from mpjax.bench import filled_pages
from mpjax.bench.cached_bytes import is_pages
from mpjax.generation.loop import STRIDE, Loop
from mpjax.generation.state import State
from mpjax.memory import require_free_on
from mpjax.models import Decoder
from mpjax.sampling.settings import RowSettings, Sampling


def endless(batch: int, new_tokens: int) -> RowSettings:
    """Greedy settings without stop tokens, since random weights must not end a row early."""
    settings = RowSettings.of([Sampling()], batch, max_new_tokens=new_tokens)
    return jax.tree.map(from_host, dataclasses.replace(settings, min_new_tokens=None))


def empty_loop(
    lm: mpjax.LanguageModel,
    settings: RowSettings,
    max_tokens: int,
    columns: int,
    adapters: jax.Array | None = None,
) -> Loop:
    """A loop with an empty cache, in the KV format and pages of `lm`, before its first token.

    max_tokens: the cache's capacity per row. columns: the room for new tokens per row. adapters:
    int32 [rows], as in DecoderCache.

    Raises DeviceMemoryError if a device has no room for the cache.
    """
    batch = len(settings.max_new_tokens)
    create = functools.partial(lm.model.create_cache, batch, max_tokens, lm.kv_format, lm.page_size)
    shape = jax.tree.leaves(jax.eval_shape(create))
    needed = sum(leaf.size * leaf.dtype.itemsize for leaf in shape)
    what = f"a {lm.kv_format} cache for {batch} × {max_tokens} tokens"
    require_free_on(lm.model.mesh, needed, what)
    none = np.zeros(batch, np.int32)
    state = State(
        dataclasses.replace(create(), adapters=adapters),
        newest=from_host(none),
        counts=from_host(none),
        running=from_host(np.ones(batch, bool)),
        settings=settings,
    )
    loop = Loop.begin(state, columns, lm.model.columns)
    return dataclasses.replace(loop, before=from_host(none))  # which shares no buffer with counts


def fill(loop: Loop, tokens: int, mesh: jax.sharding.Mesh | None = None) -> Loop:
    """Fills a loop's KV cache with `tokens` random keys and values per row.

    Layers' states of fixed size per sequence are unchanged.
    """
    cache = loop.state.cache
    states, tree = jax.tree.flatten(cache.layers, is_leaf=is_pages)
    states = [
        filled_pages.fill(state, cache.tables[0], tokens, seed, mesh) if is_pages(state) else state
        for seed, state in enumerate(states)
    ]
    layers = jax.tree.unflatten(tree, states)
    cache = jax.block_until_ready(dataclasses.replace(cache, layers=layers))
    return dataclasses.replace(loop, state=dataclasses.replace(loop.state, cache=cache))


def rewind(loop: Loop, tokens: int) -> Loop:
    """The loop after `tokens` prompt tokens and the first new one, to decode from there again.

    New values are copied from the host, so that no kernel runs and is counted. Later tokens in the
    cache will be overwritten. A residual and states of fixed size still contain later tokens, so
    the next round has correct times but wrong tokens.
    """
    state, batch = loop.state, len(loop.tokens)
    state = dataclasses.replace(
        state,
        cache=dataclasses.replace(state.cache, lengths=from_host(np.full(batch, tokens, np.int32))),
        newest=from_host(np.asarray(loop.tokens)[:, 0]),
        counts=from_host(np.ones(batch, np.int32)),
        running=from_host(np.ones(batch, bool)),
    )
    return dataclasses.replace(loop, state=state)


def from_host(array: np.ndarray | np.generic) -> jax.Array:
    """A device array, copied from the host without a kernel."""
    return jax.device_put(array)


class CaseDecoding:
    """A model and a generation loop after prefill; each call decodes from the end of the prompt.

    Calls donate the loop and keep the returned one. prompt: the number of prompt tokens of a row.
    """

    def __init__(self, model: Decoder, loop: Loop, prompt: int) -> None:
        self.model, self.loop, self.prompt = model, loop, prompt

    def act(self, generate: Callable[[Loop], Loop]) -> None:
        """Calls a function with the loop after the prompt, and keeps the returned loop."""
        self.loop = generate(rewind(self.loop, self.prompt))

    def run(self, program: Callable[..., Loop], until: jax.Array) -> jax.Array:
        """Runs a `decode` program until a step; returns the tokens, which the caller can await."""
        self.act(lambda loop: program(self.model, loop, until, stride=STRIDE))
        return self.loop.tokens
