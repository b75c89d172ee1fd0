"""Drafts: a layer after the decoder's, whose entries follow the decoder's cache.

The layer reads the decoder's hidden states. Each step of the decoder adds the step's tokens to the
layer's state, so pages, preemption, shared prefixes and rollback need nothing of their own. The
entry of a token at position p depends on the tokens up to p alone: it is made from that token and
the hidden state of the token before it.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.models.cache_scales import CacheScales
from mpjax.models.draft_layer import DraftMixer
from mpjax.models.keeper import Keeper
from mpjax.models.layer import stream_of
from mpjax.models.state import DecoderCache, StepContext


class Drafts(Keeper):
    """Base class of Decoder that runs the layer that drafts, if there is one."""

    @property
    def _drafting(self) -> DraftMixer:
        """The mixer of the layer that drafts."""
        mixer: DraftMixer = self.layers[-1].attention
        return mixer

    def draft(
        self,
        tokens: jax.Array,
        counts: jax.Array,
        cache: DecoderCache,
        hidden: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, DecoderCache]:
        """Adds one token of each sequence to the layer that drafts, and predicts the next.

        tokens: int32 [batch]. counts: int32 [batch], 1 or 0: sequences with 0 don't change, and
            their results are undefined. hidden: [batch, hidden], of an earlier call, or None for
            the hidden state of the decoder before `tokens`. Nothing is checked.

        The caller resets the cache with `forget`: then the next step adds the same tokens again.

        Returns logits float32 [batch, columns], a hidden state [batch, hidden] for the next call,
        and the cache.
        """
        lengths = cache.rotary_lengths
        lengths = None if lengths is None else lengths[:, None]
        angles = self.angles_by_rope(cache.lengths[:, None], lengths)
        context = StepContext.of(cache, counts, angles)
        found = self._drafted(tokens[:, None], context, cache.layers[-1], hidden)
        logits, hidden, state = found
        layers = (*cache.layers[:-1], state)
        cache = dataclasses.replace(cache, layers=layers, lengths=cache.lengths + counts)
        return logits, hidden, cache

    def draft_features(self, seen: list[jax.Array]) -> jax.Array:
        """The hidden states of an EAGLE-3 head from the streams that it reads, [..., hidden]."""
        return self._drafting.features(seen[-1], seen)

    def draft_whole(self, tokens: jax.Array, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The layer that drafts over whole sequences, without a cache; differentiable.

        tokens: int [batch, tokens]. hidden: [batch, tokens, hidden], the hidden state before each
            token, from `draft_features` or from an earlier call. The first one is not used.

        Returns logits float32 [batch, tokens, columns], of the tokens after each, and hidden
        states.
        """
        context = self._whole(tokens, None)
        terms, residual, _ = self._run_drafting(tokens, hidden, context, None)
        read, hidden = self._drafting.finish(terms, residual)
        return self._drafting.logits(self, read, context), hidden

    def _drafted(
        self, tokens: jax.Array, context: StepContext, state: Any, hidden: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, Any]:
        """The results of `draft`, with the layer's state. tokens: int32 [batch, 1]."""
        mixer = self._drafting
        hidden = mixer.before(context, state) if hidden is None else hidden
        terms, residual, state = self._run_drafting(tokens, hidden[:, None], context, state)
        read, hidden = mixer.finish(terms, residual)
        return mixer.logits(self, read[:, 0], context), hidden[:, 0], state

    def _remember(
        self,
        tokens: jax.Array,
        hidden: jax.Array,
        seen: list[jax.Array],
        context: StepContext,
        state: Any,
    ) -> Any:
        """The state of the layer that drafts, with a step's tokens.

        tokens, context: as for `Decoder.forward`. hidden: [..., hidden], after each token.
        seen: the streams that `_see` has kept.

        Only the state is used: compilers remove the layer's MLP and its attention to the entries.
        """
        mixer = self._drafting
        before, last = mixer.last.mix(mixer.features(hidden, seen), context, state[1])
        _, _, after = self._run_drafting(tokens, before, context, state)
        return after[0], last

    def _run_drafting(
        self, tokens: jax.Array, hidden: jax.Array, context: StepContext, state: Any
    ) -> tuple[jax.Array, jax.Array, Any]:
        """The terms, stream and state of the layer for tokens and the hidden state before each."""
        mixer, embedded = self._drafting, self._drafting.embedding_of(tokens)
        embedded = self._look_up(tokens, context) if embedded is None else embedded
        pair = embedded, hidden.astype(embedded.dtype)
        return mixer.run(self.layers[-1], pair, context, state)

    def _see(
        self, seen: list[jax.Array], index: int, terms: jax.Array, residual: jax.Array | None
    ) -> None:
        """Keeps the stream that enters a layer if the layer that drafts reads it."""
        depth = self.config.depth
        if depth < self.config.num_layers and index in self._drafting.taps:
            seen.append(stream_of(terms, residual))

    def without_drafts(self) -> Self:
        """The model without the layer that drafts; arrays are shared."""
        model: Self = jax.tree.map(lambda array: array, self)
        model._drop_drafts()
        return model

    def _drop_drafts(self, shards: int = 1) -> None:
        """Drops the layer that drafts, in place. shards: the number of concatenated shares."""
        self.config = self.config.without_drafts()
        depth = self.config.depth
        self.layers = nnx.List(self.layers[:depth])
        if self.cache_scales is not None:
            scales = self.cache_scales.get_value()

            def kept(scales: jax.Array) -> jax.Array:
                pieces = jnp.split(scales, shards)
                return jnp.concatenate([piece[:depth] for piece in pieces])

            self.cache_scales = CacheScales(jax.jit(kept, out_shardings=scales.sharding)(scales))

    @abc.abstractmethod
    def angles_by_rope(
        self, positions: jax.Array, lengths: jax.Array | None = None
    ) -> dict[str, jax.Array]:
        """See Decoder."""

    @abc.abstractmethod
    def _whole(self, tokens: Any, adapters: jax.Array | None) -> StepContext:
        """The context of whole sequences."""

    @abc.abstractmethod
    def _look_up(self, tokens: jax.Array, context: StepContext) -> jax.Array:
        """The residual stream before the first layer, [..., hidden]."""

    @abc.abstractmethod
    def _logits(self, hidden: jax.Array, context: StepContext) -> jax.Array:
        """Logits float32 [..., columns] of hidden states after a final norm."""
