"""Drafts: a layer behind the decoder's, whose entries follow the decoder's cache.

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

from mpjax.kernels.plans import conditions as plan_conditions
from mpjax.models.cache_scales import CacheScales
from mpjax.models.keeper import Keeper
from mpjax.models.layer import apply
from mpjax.models.mtp import MTP
from mpjax.models.state import DecoderCache, StepContext


class Drafts(Keeper):
    """Base class of Decoder that runs the layer that drafts, if there is one."""

    @property
    def _drafting(self) -> MTP:
        """The mixer of the layer that drafts."""
        mixer: MTP = self.layers[-1].attention
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

    def _drafted(
        self, tokens: jax.Array, context: StepContext, state: Any, hidden: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, Any]:
        """The results of `draft`, with the layer's state. tokens: int32 [batch, 1]."""
        mixer = self._drafting
        hidden = mixer.before(context, state) if hidden is None else hidden
        embedded = self._look_up(tokens, context)
        stream = mixer.join(embedded, hidden[:, None].astype(embedded.dtype), context)
        run = plan_conditions(), self.layers[-1], stream[None], None, context
        terms, residual, state = apply(*run, state)
        _, found = mixer.norm.add(terms, residual, None)
        assert isinstance(found, jax.Array)
        return self._logits(found[:, 0], context), found[:, 0], state

    def _remember(
        self, tokens: jax.Array, hidden: jax.Array, context: StepContext, state: Any
    ) -> Any:
        """The state of the layer that drafts, with a step's tokens.

        tokens, context: as for `Decoder.forward`. hidden: [..., hidden], after each token.

        Only the state is used: compilers remove the layer's MLP and its attention to the entries.
        """
        mixer = self._drafting
        before, last = mixer.last.mix(hidden, context, state[1])
        stream = mixer.join(self._look_up(tokens, context), before, context)
        run = plan_conditions(), self.layers[-1], stream[None], None, context
        _, _, after = apply(*run, state)
        return after[0], last

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
    def _look_up(self, tokens: jax.Array, context: StepContext) -> jax.Array:
        """The residual stream before the first layer, [..., hidden]."""

    @abc.abstractmethod
    def _logits(self, hidden: jax.Array, context: StepContext) -> jax.Array:
        """Logits float32 [..., columns] of hidden states after a final norm."""
