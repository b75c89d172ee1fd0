"""Creates, clears and copies the states of a decoder's layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.kernels import KVFormat
from mpjax.kernels.checks import whole_number
from mpjax.kernels.kv_cache.layout import read_page_size
from mpjax.models.cache_scales import CacheScales, scales_for
from mpjax.models.config import DecoderConfig
from mpjax.models.state import DecoderCache, Room, StepContext
from mpjax.models.watch import Capture, empty_captured, read_capture, read_steer


class Keeper(nnx.Module):
    """Base class of Decoder that creates, clears and copies the states of its layers.

    config, layers, cache_scales, deterministic: as in Decoder.
    """

    config: DecoderConfig
    layers: Any
    cache_scales: CacheScales | None
    deterministic: KVFormat | None = None

    def create_cache(
        self, batch: int, max_tokens: int, format: KVFormat | str, page_size: int = 128
    ) -> DecoderCache:
        """An empty cache for this model, with the model's cache_scales if the format uses them.

        batch: number of sequences. max_tokens: room of each sequence, rounded up to whole pages.
        format: a KV format, such as `KV8`. page_size: tokens in a page: 16, 32, 64, 128 or 256.

        Warns if the format has a scale for each head but cache_scales are for each channel: then
        the cache's scales are 1.
        """
        format = KVFormat.of(format)
        page_size = read_page_size(page_size, format)
        batch, max_tokens = whole_number("batch", batch), whole_number("max_tokens", max_tokens)
        entries = -(-max_tokens // page_size)
        groups = len(self.config.page_groups)
        by_length = self.config.scaling_by_length is not None
        return DecoderCache(
            self.create_states((batch * entries,) * groups, batch, format, page_size),
            # Each table is a buffer of its own: a buffer that appears twice can't be donated.
            tuple(
                jnp.arange(batch * entries, dtype=jnp.int32).reshape(batch, entries)
                for _ in range(groups)
            ),
            jnp.zeros(batch, jnp.int32),
            format,
            page_size,
            rotary_lengths=jnp.zeros(batch, jnp.int32) if by_length else None,
        )

    def watch(
        self, cache: DecoderCache, positions: int, *, capture: Capture, steer: Any
    ) -> DecoderCache:
        """The cache with captures and changes of activations in its steps, as in `Decoder.inspect`.

        positions: the number of captured positions, from 0: `cache.captured` has arrays [batch,
        positions, ...] by point and layer, zeros at positions without a token. Raises ValueError as
        `inspect`.
        """
        steer, found = read_steer(self, steer), read_capture(self, capture)
        # Copies: caches are donated.
        steer = jax.tree.map(jnp.array, steer)
        shape = len(cache.lengths), positions
        captured = empty_captured(self.config, found, shape) if found else None
        return dataclasses.replace(cache, steer=steer, captured=captured)

    def create_states(
        self,
        pages: Sequence[int],
        sequences: int,
        format: KVFormat | str,
        page_size: int = 128,
        snapshots: int = 0,
    ) -> tuple[Any, ...]:
        """The empty state of each layer, as in `create_cache`, not yet assigned to sequences.

        pages: the number of pages of each group of layers. sequences: the most sequences with a
        state at once. snapshots: room, after the sequences', for copies of a sequence's fixed-size
        states.
        """
        config, format = self.config, KVFormat.of(format)
        if self.deterministic not in (None, format):
            raise ValueError(
                f"the cache is {format}, and the model deterministic with {self.deterministic}: "
                "expected the same KV format"
            )
        scales = scales_for(self.cache_scales, format)
        room = sequences, format, page_size, snapshots
        return tuple(
            spec.create(
                Room(0 if group is None else pages[group], *room),
                None if scales is None else scales[number],
            )
            for number, (spec, group) in enumerate(zip(config.states, config.groups, strict=True))
        )

    def clear_states(
        self, states: tuple[Any, ...], pages: Sequence[jax.Array], slots: jax.Array
    ) -> tuple[Any, ...]:
        """The states with zeros in some pages, and in the fixed-size states of some slots.

        pages: int32 [any number] for each group of layers. slots: int32 [any number]. Numbers out
        of range are ignored.
        """
        nothing = jnp.zeros(0, jnp.int32)
        return tuple(
            spec.clear(state, nothing if group is None else pages[group], slots)
            for spec, group, state in zip(
                self.config.states, self.config.groups, states, strict=True
            )
        )

    def settle_states(self, states: tuple[Any, ...], context: StepContext) -> tuple[Any, ...]:
        """The states after a tentative step, with the first `context.counts` tokens of the step."""
        return tuple(
            layer.attention.settle(state, context) if spec.keeps_sequences else state
            for layer, spec, state in zip(self.layers, self.config.states, states, strict=True)
        )

    def settle(self, cache: DecoderCache, before: DecoderCache, counts: jax.Array) -> DecoderCache:
        """The cache after a tentative step, with only the first tokens of each sequence.

        before: the cache before the step, whose lengths are used. counts: int32 [batch], the number
        of the step's tokens to keep; the next step overwrites the keys and values of the others.
        """
        lengths, layers = before.lengths + counts, cache.layers
        if self.config.keeps_sequences:
            context = StepContext.of(before, counts, {})
            layers = self.settle_states(layers, context)
        return dataclasses.replace(cache, layers=layers, lengths=lengths)

    def forget(self, cache: DecoderCache, before: DecoderCache) -> DecoderCache:
        """The cache without the tokens that were added since `before`."""
        layers = tuple(
            spec.forget(state, old)
            for spec, state, old in zip(
                self.config.states, cache.layers, before.layers, strict=True
            )
        )
        return dataclasses.replace(cache, layers=layers, lengths=before.lengths)

    def copy_states(
        self, states: tuple[Any, ...], source: jax.Array, target: jax.Array
    ) -> tuple[Any, ...]:
        """The states with a sequence's fixed-size states copied from one index to another.

        source, target: int32 scalars: a slot, or after all slots a snapshot. A target out of range
        changes nothing.
        """
        return tuple(
            spec.copy(state, source, target)
            for spec, state in zip(self.config.states, states, strict=True)
        )
