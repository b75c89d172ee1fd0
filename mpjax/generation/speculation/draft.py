"""Draft: a small model with the same vocabulary proposes tokens for the large one to verify."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.generation.prefill import read_prompts
from mpjax.generation.speculation.drafting import Drafting
from mpjax.generation.speculation.proposer import (
    Context,
    Proposal,
    Proposer,
    read_k,
)
from mpjax.kernels.checks import require_type
from mpjax.language_model import LanguageModel
from mpjax.models.rereading import read_again
from mpjax.models.state import DecoderCache
from mpjax.text.tokenizer import Tokenizer

PIECE = 512  # the draft model's prefill chunk, when a row begins in an engine
COMPARED = 1000  # the number of token ids that are compared between two tokenizers


@jax.tree_util.register_pytree_node_class
class Draft(Proposer):
    """Proposes tokens of a smaller model, which has its own cache.

    The draft model samples with the large one's settings (processors, temperature, top-k, top-p,
    min-p), one token after another. It pays off if it is many times faster than the large model and
    often agrees with it: Qwen3-0.6B for Qwen3-8B. (Leviathan et al., 2023; Chen et al., 2023.)

    lm: the draft model, as mpjax.load returns it, with the large model's vocabulary. k: the most
        proposed tokens, 1 to 32.

    Raises ValueError for invalid arguments.
    """

    always = True

    def __init__(self, lm: LanguageModel, k: int = 4) -> None:
        require_type("Draft: lm", lm, LanguageModel, hint=", as mpjax.load gives it")
        self.model, self.k = lm.for_device, read_k("Draft", k)
        self.kv_format, self.page_size = lm.kv_format, lm.page_size
        self.tokenizer: Tokenizer | None = lm.tokenizer

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The model is a child; k and the cache's format and page size are static."""
        return (self.model,), (self.k, self.kv_format, self.page_size)

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], leaves: tuple[Any, ...]) -> Draft:
        """The Draft with other leaves, without its tokenizer."""
        made = object.__new__(cls)
        [made.model], (made.k, made.kv_format, made.page_size) = leaves, static
        made.tokenizer = None
        return made

    @property
    def block(self) -> int | None:  # type: ignore[override]
        """Tokens of a block of the draft's cache; None for formats without blocks."""
        return self.kv_format.block

    def require(self, tokenizer: Tokenizer | None, tokens: int) -> None:
        """Raises ValueError if the vocabularies differ, or rows may exceed the draft's positions.

        One vocabulary may have more ids than the other, such as padding in a GGUF file; ids that
        the large model lacks are never proposed.

        tokenizer: of the large model; None isn't compared. tokens: length of the longest row.
        """
        positions = self.model.config.max_position_embeddings
        if tokens > positions:
            raise ValueError(
                f"speculate: a row may have {tokens} tokens, and the draft model has {positions} "
                "positions: ask for fewer tokens, or load the draft with max_positions"
            )
        if tokenizer is None or self.tokenizer is None:
            return
        mine, other = self.tokenizer.backend, tokenizer.backend
        sizes = mine.get_vocab_size(), other.get_vocab_size()
        ids = range(0, min(sizes), max(1, min(sizes) // COMPARED))
        if any(mine.id_to_token(i) != other.id_to_token(i) for i in ids):
            raise ValueError(
                f"speculate: the draft model has another vocabulary, of {sizes[0]} tokens, than "
                f"the model, of {sizes[1]}: take a smaller model of the same family"
            )

    def create(self, batch: int, tokens: int) -> DecoderCache:
        """An empty cache of the draft model, in its own format."""
        return self.model.create_cache(batch, tokens, self.kv_format, self.page_size)

    def read(self, own: DecoderCache, tokens: jax.Array, lengths: jax.Array) -> DecoderCache:
        """The cache after the draft model's prefill of the prompts."""
        return read_prompts(self.model, self._known_ids(tokens), lengths, own)[1]

    def begin(
        self, own: DecoderCache, slot: jax.Array, tokens: jax.Array, count: jax.Array
    ) -> DecoderCache:
        """The caches after the draft model's prefill of a row, in chunks that end with blocks."""
        size = self.kv_format.block or min(PIECE, len(tokens))
        cache = own.rows(slot[None])

        def read(cache: DecoderCache) -> DecoderCache:
            places = cache.lengths[:, None] + jnp.arange(size)[None]
            piece = self._known_ids(tokens[jnp.minimum(places, len(tokens) - 1)])
            counts = jnp.minimum(count - cache.lengths, size)
            return self.model.step(piece, counts, cache)[1]

        cache = cache.begin(count[None])
        cache = jax.lax.while_loop(lambda cache: cache.lengths[0] < count, read, cache)
        return own.with_rows(slot[None], cache)

    def rows(self, own: DecoderCache, slots: jax.Array) -> DecoderCache:
        """The cache of some slots; the pages are shared by all slots."""
        return own.rows(slots)

    def put_rows(self, own: DecoderCache, slots: jax.Array, rows: DecoderCache) -> DecoderCache:
        """The cache of all slots after writing that of some."""
        return own.with_rows(slots, rows)

    def propose(self, context: Context) -> tuple[Proposal, DecoderCache]:
        """Adds the tokens that the draft's cache lacks, and draws up to k more.

        The cache lacks the newest token and, if the whole last proposal was accepted, its last
        token, which was drawn but never fed to the draft model. With recurrent layers it lacks all
        accepted tokens, since their states are rolled back to those before drafting.
        """
        own: DecoderCache = context.state.speculation.own
        history, most = context.history, context.most
        keeps = self.model.config.keeps_sequences
        width = self.k + 1 if keeps else 2
        places = jnp.minimum(own.lengths[:, None] + jnp.arange(width)[None], history.shape[1] - 1)
        lacking = jnp.where(context.alive, context.known - own.lengths, 0)
        tokens = self._known_ids(jnp.take_along_axis(history, places, axis=1))
        if self.model.config.rereads_after is not None:
            upcoming = jnp.where(context.alive, lacking + jnp.maximum(most - 1, 0), 0)
            own = read_again(self.model, own, upcoming, lambda row: history[row])
        logits, own = self.model.step(tokens, lacking, own)
        drafting = Drafting.begin(context, own, self.k)
        divided = self.model.shards > 1

        def advance(number: jax.Array, carry: tuple[Drafting, jax.Array]) -> Any:
            drafting, logits = carry
            drafting, drawn = drafting.draw(logits, context, number, divided=divided)
            # The last drawn token is not fed to the model here: the next proposal does it.
            reads = (number + 1 < most).astype(jnp.int32)
            logits, cache = self.model.step(self._known_ids(drawn)[:, None], reads, drafting.cache)
            return dataclasses.replace(drafting, cache=cache), logits

        drafting, logits = jax.lax.fori_loop(0, self.k - 1, advance, (drafting, logits))
        drafting, _ = drafting.draw(logits, context, jnp.int32(self.k - 1), divided=divided)
        cache = self.model.forget(drafting.cache, own) if keeps else drafting.cache
        return Proposal(drafting.tokens, most, drafting.probabilities), cache

    def settle(
        self, own: DecoderCache, known: jax.Array, proposed: jax.Array, accepted: jax.Array
    ) -> DecoderCache:
        """The cache without rejected tokens."""
        return dataclasses.replace(own, lengths=jnp.minimum(own.lengths, known + accepted))

    def _known_ids(self, tokens: jax.Array) -> jax.Array:
        """Tokens with ids clamped to the draft's vocabulary; no text has larger ids."""
        return jnp.minimum(tokens, self.model.config.vocab_size - 1)
