"""Draws the tokens of a proposal, one after another, from the logits of whatever drafts."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from mpjax.generation.speculation.acceptance import DRAFTING, draw
from mpjax.generation.speculation.proposer import Context
from mpjax.generation.speculation.verification import distribution
from mpjax.models.state import DecoderCache
from mpjax.sampling.processors import Attachment, advance, process
from mpjax.sampling.random_keys import row_keys, step_keys


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["cache", "tokens", "probabilities", "processors"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Drafting:
    """An unfinished proposal.

    cache: with the tokens drawn so far, of a draft model or of the model itself.
    tokens: int32 [batch, k], drawn so far, then zeros.
    probabilities: the distributions they were drawn from, float32 [batch, k, vocabulary]; None if
        greedy. processors: as in State, after the drawn tokens.
    """

    cache: DecoderCache
    tokens: jax.Array
    probabilities: jax.Array | None
    processors: Attachment

    @classmethod
    def begin(cls, context: Context, cache: DecoderCache, k: int) -> Drafting:
        """The proposal before its first token."""
        batch = len(context.most)
        probabilities = None
        if not context.settings.greedy:
            probabilities = jnp.zeros((batch, k, context.vocabulary), jnp.float32)
        tokens = jnp.zeros((batch, k), jnp.int32)
        return cls(cache, tokens, probabilities, context.state.processors)

    def draw(
        self, logits: jax.Array, context: Context, number: jax.Array, *, divided: bool
    ) -> tuple[Drafting, jax.Array]:
        """Draws token `number` of each row from logits [batch, the draft's vocabulary].

        divided: whether the vocabulary axis is sharded; see `draw`.
        """
        logits = fit(logits, context.vocabulary)
        probabilities, settings = self.probabilities, context.settings
        places = context.state.counts + number
        logits = process(self.processors, logits, places)
        if probabilities is None:
            drawn = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        else:
            here = distribution(logits, settings, divided=divided)
            own = step_keys(row_keys(settings.key_words), places)
            drawn = draw(here, step_keys(own, DRAFTING))
            probabilities = jax.lax.dynamic_update_slice_in_dim(
                probabilities, here[:, None], number, 1
            )
        is_new = jnp.ones((len(drawn), 1), bool)
        processors = advance(self.processors, drawn[:, None], is_new)
        tokens = jax.lax.dynamic_update_slice_in_dim(self.tokens, drawn[:, None], number, 1)
        return Drafting(self.cache, tokens, probabilities, processors), drawn


def fit(logits: jax.Array, vocabulary: int) -> jax.Array:
    """Logits cut or padded with -inf to the large model's vocabulary.

    Models of one family may pad the same vocabulary to different sizes.
    """
    missing = max(0, vocabulary - logits.shape[1])
    wide = jnp.pad(logits[:, :vocabulary], ((0, 0), (0, missing)), constant_values=-jnp.inf)
    return wide.astype(jnp.float32)
