"""The decoder that all families share: embedding, layers, final norm, head."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.kernels import (
    KVFormat,
    KVLayout,
    KVPages,
    PagedKVCache,
    Span,
    WeightFormat,
)
from mpjax.kernels.checks import are_between, as_array, is_known, require_type, shown
from mpjax.kernels.kv_cache.cache import create_pages
from mpjax.kernels.kv_cache.varlen import tokens_of
from mpjax.kernels.plans import conditions as plan_conditions
from mpjax.models import config_json, config_keys, parameters, rotary, tables
from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import DecoderConfig, SublayerSpec
from mpjax.models.config_checks import require_sound
from mpjax.models.experts import ExpertsSpec
from mpjax.models.layer import DecoderLayer
from mpjax.models.layers import Linear, RMSNorm
from mpjax.models.mlp import GatedMLPSpec
from mpjax.models.parameters import ArrayPlace, LinearPlace, Names
from mpjax.models.riders import RidersSpan, last_hidden, last_tokens
from mpjax.models.step_checks import require_counts, require_empty, require_positions
from mpjax.models.vocabulary import Vocabulary
from mpjax.models.window import Window


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _apply(
    plans: Hashable, layer: DecoderLayer, *arguments: Any
) -> tuple[jax.Array, jax.Array, KVPages | None]:
    """Applies a layer. JAX traces and lowers alike layers once: with kernels, that is slow.

    plans: the conditions that plans depend on besides the arguments, such as the device and the
    tables of plans; `jit` traces anew when they change.
    """
    return layer(*arguments)


class CacheScales(nnx.Variable):
    """Scales of keys and values for a cache, measured once; not a parameter to train."""


class Decoder(nnx.Module):
    """A causal language model. A family subclasses it, reads config.json and names its tensors.

    Calling it is a differentiable forward pass over whole sequences; `step` is the function behind
    prefill and decoding, pure in (parameters, tokens, counts, cache).

    names: the names of a family's tensors in Hugging Face's files; see `parameters.NAMES`.
    specs: the classes of attention and MLP specs that a family's layers may have.
    defaults, neutral: the values of keys that a family's config.json may leave out, and the only
        supported values of others; see `config_keys.complete`.
    cache_scales: CacheScales of float32 [layers, 2 (keys, values), KV heads] for FP8, or [layers,
        2, KV heads, head dim] for 8s; or None. They come from a checkpoint or a calibration.
    mesh: the devices among which the model is divided (`sharded.py`); None where it is not.
    axis: in one device's share of a divided model, the mesh axis of the devices; else None.
    """

    mesh: jax.sharding.Mesh | None = None
    names: ClassVar[Names] = parameters.NAMES
    specs: ClassVar[tuple[type[SublayerSpec], ...]] = (GroupedQuerySpec, GatedMLPSpec, ExpertsSpec)
    defaults: ClassVar[Mapping[str, Any]] = {}
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        require_type("config", config, DecoderConfig)
        require_type("rngs", rngs, nnx.Rngs, hint=", such as nnx.Rngs(0)")
        require_sound(config)
        self.config = config
        self.axis: str | None = None
        self.embedding = self._create_table(parameters.EMBEDDING, rngs)
        self.layers = nnx.List([DecoderLayer(config, spec, rngs) for spec in config.layers])
        self.cache_scales: CacheScales | None = nnx.data(None)
        self.norm = RMSNorm.of(config, config.hidden_size)
        tied = config.tie_word_embeddings
        self.head = None if tied else self._create_table(parameters.HEAD, rngs)

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """The configuration in a Hugging Face `config.json` of this family, checked.

        Raises ConfigError, which names the key, for a missing key, an unsupported value, and values
        that don't fit together.
        """
        hf = config_keys.complete(hf, cls.defaults, cls.neutral)
        config = cls.read_config(hf)
        require_sound(config, config_keys.WHERE, config_json.field_names(hf))
        return config

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads the family's `config.json`, completed; `config_from_hf` checks that values fit.

        Raises ConfigError, which names the key.
        """
        raise NotImplementedError(f"{cls.__name__} does not read config.json; its subclasses do")

    @classmethod
    def array_places(cls, config: DecoderConfig) -> list[ArrayPlace]:
        """Places of all parameters outside linear maps, in the module and in files."""
        return parameters.array_places(config, cls.names)

    @classmethod
    def linear_places(cls, config: DecoderConfig) -> list[LinearPlace]:
        """Places of all linear maps, in the module and in files: of layers, and packed tables."""
        return parameters.linear_places(config, cls.names)

    def put_array(self, place: ArrayPlace, array: Any, rows: Window | None = None) -> None:
        """Puts an array into its place; rows: those that it has of a table, None for all."""
        place.assign(self, array)

    def put_linears(
        self, place: LinearPlace, parts: Sequence[Linear], windows: Sequence[Window] | None = None
    ) -> None:
        """Puts linear maps into their place.

        windows: the channels that they have of each map in the files; None for all.
        """
        place.assign(self, parts)

    def windows(self, place: LinearPlace) -> list[Window] | None:
        """The channels of each map in the files of a place that this process needs; None: all."""
        return None

    def rows(self, place: ArrayPlace) -> Window | None:
        """The rows of a table that this process needs; None: all."""
        return None

    def put_cache_scales(self, scales: Any) -> None:
        """Puts the scales of a cache, whole, into the model."""
        self.cache_scales = CacheScales(scales)

    def limit_positions(self, positions: int) -> None:
        """Sets the most tokens that a sequence may have; nothing else of the model changes."""
        self.config = dataclasses.replace(self.config, max_position_embeddings=positions)

    @property
    def shards(self) -> int:
        """The number of devices among which the model is divided."""
        return 1 if self.mesh is None else self.mesh.size

    @property
    def columns(self) -> int:
        """The number of columns of `step`'s logits: the vocabulary, a multiple of the devices."""
        return -(-self.config.vocab_size // self.shards) * self.shards

    @property
    def family_name(self) -> str:
        """The name of the family's class."""
        return type(self).__name__

    @property
    def vocabulary(self) -> Vocabulary:
        """The token ids, and how they are divided among devices."""
        return Vocabulary(self.config.vocab_size, self.axis)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits float32 [batch, tokens, vocabulary] after every token of int [batch, tokens].

        Raises ValueError for another shape or dtype and for more tokens than the model has
        positions, also under `jit`; outside `jit` also for token ids that the vocabulary lacks.
        """
        tokens = self._read_whole(tokens)
        positions = jnp.arange(tokens.shape[1])[None]
        positions = jnp.zeros((tokens.shape[0], 1), jnp.int32) + positions
        hidden, _ = self._hidden(tokens, self.angles_by_rope(positions), None, None)
        return self._logits(hidden)

    def step(
        self,
        tokens: jax.Array,
        counts: jax.Array,
        cache: PagedKVCache,
        *,
        fresh: bool = False,
        every_position: bool = False,
    ) -> tuple[jax.Array, PagedKVCache]:
        """Adds tokens to the cache and computes the logits of the token after them.

        tokens: int [batch, tokens], padded on the right. counts: int32 [batch], each row's number
        of tokens without the padding.
        fresh: whether the cache is known to be empty (static); attention then reads the prompt's
        keys and values before they are quantised.
        every_position: whether to return logits after each token, not only the last (static).

        Returns float32 logits and the next cache. Logits are [batch, vocabulary], after each row's
        last token, or with every_position [batch, tokens, vocabulary].

        In KV formats with blocks (`KVFormat.block`) a new token reads earlier keys and values from
        codes once their block is complete, and in 16 bits until then. A step of several tokens
        therefore gives the logits of steps of single tokens only if it does not pass the end of a
        block.

        With LongRoPE and dynamic scaling, a fresh step raises the cache's rotary lengths to counts.

        Raises ValueError for shapes and dtypes that don't fit. Outside `jit` it also raises for
        token ids that the vocabulary lacks, more tokens than the cache has room for or the model
        has positions, counts above the number of tokens, and a cache that is not empty though
        `fresh`. Under `jit` the caller answers for these; tokens without room in the cache are not
        written.
        """
        tokens, counts = self._read_step(tokens, counts, cache, fresh)
        span = Span(
            cache.block_tables,
            cache.lengths,
            counts,
            fresh,
            residual_pages=cache.residual_pages,
        )
        positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1])[None]
        if (lengths := cache.rotary_lengths) is not None:
            lengths = jnp.maximum(lengths, counts) if fresh else lengths
            cache = dataclasses.replace(cache, rotary_lengths=lengths)
            lengths = lengths[:, None]
        angles = self.angles_by_rope(positions, lengths)
        hidden, layers = self._hidden(tokens, angles, cache.layers, span)
        if not every_position:
            hidden = last_hidden(hidden, counts)
        cache = dataclasses.replace(cache, layers=layers, lengths=cache.lengths + counts)
        return self._logits(hidden), cache

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits float32 [..., vocabulary] of hidden states [..., hidden] after the last layer."""
        return self._logits(self.norm(as_array("hidden", hidden)))

    def _read_step(
        self, tokens: Any, counts: Any, cache: PagedKVCache, fresh: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Tokens and counts of a step as arrays. Raises ValueError as `step` says."""
        tokens, counts = self._read_tokens(tokens), as_array("counts", counts)
        require_type("cache", cache, PagedKVCache, hint=", as model.create_cache makes it")
        if len(cache.layers) != self.config.num_layers:
            raise ValueError(
                f"the cache has {len(cache.layers)} layers, and the model has "
                f"{self.config.num_layers}: create the cache with model.create_cache"
            )
        if self.config.scaling_by_length is not None and cache.rotary_lengths is None:
            raise ValueError(
                "the cache has no rotary lengths: create the cache with model.create_cache"
            )
        require_counts(counts, tokens)
        cache.require_room(counts)
        if fresh:
            require_empty(cache)
        if is_known((cache.lengths, counts)):
            ends = np.asarray(cache.lengths) + np.asarray(counts)
            require_positions(self.config, int(ends.max()))
        return tokens, counts

    def step_varlen(
        self,
        tokens: jax.Array,
        counts: jax.Array,
        cache: PagedKVCache,
        *,
        encoded: jax.Array | None = None,
        every_position: bool = False,
        riders: int = 0,
    ) -> tuple[jax.Array, PagedKVCache]:
        """Adds varlen tokens to the cache, as `step` adds padded ones, for use under `jit`.

        tokens: int32 [tokens], those of all sequences one after another, and padding after them.
        counts: int32 [batch], the number of each sequence's new tokens.
        encoded: as in Span, for sequences that begin after a shared prefix.
        every_position: whether to return logits after each token (static).
        riders: number of sequences, the last ones, that have one token each, which stand at the end
            of `tokens`, after the padding (static). Attention takes them as rows that decode, and
            not as prompts. A count of 0 is a rider that adds nothing. `encoded` is of the others.

        New tokens read earlier keys and values, and their own, from the cache in its format. In
        formats with blocks they have the logits of steps of single tokens if no sequence's tokens
        pass the end of a block.

        Returns float32 logits and the next cache. Logits are [batch, vocabulary], after each
        sequence's last token, without meaning for sequences without new tokens; or with
        every_position [tokens, vocabulary]. Nothing is checked.
        """
        prompts = len(counts) - riders
        found = tokens_of(counts[:prompts], len(tokens) - riders)
        positions = cache.lengths[found.sequence] + found.number
        lengths = cache.rotary_lengths
        if lengths is not None:
            lengths = jnp.concatenate([lengths[found.sequence], lengths[prompts:]])
        span: Span | RidersSpan = Span(
            cache.block_tables,
            cache.lengths,
            counts,
            residual_pages=cache.residual_pages,
            encoded=encoded,
        )
        if riders:
            positions = jnp.concatenate([positions, cache.lengths[prompts:]])
            span = RidersSpan.of(cache, counts, encoded, riders)
        angles = self.angles_by_rope(positions, lengths)
        hidden, layers = self._hidden(tokens, angles, cache.layers, span)
        if not every_position:
            hidden = hidden[last_tokens(span, len(tokens))]
        cache = dataclasses.replace(cache, layers=layers, lengths=cache.lengths + counts)
        return self._logits(hidden), cache

    def create_cache(
        self, batch: int, max_tokens: int, format: KVFormat | str, page_size: int = 128
    ) -> PagedKVCache:
        """An empty cache for this model, with the model's cache_scales where the format uses them.

        batch: number of sequences. max_tokens: the room of each, rounded up to whole pages.
        format: a KV format, such as `KV8`. page_size: tokens in a page: 16, 32, 64, 128 or 256.

        Warns where the format has a scale for each head and cache_scales are for each channel: the
        cache's scales are 1 then.
        """
        layout, scales = self._cache_layout(format, page_size)
        return PagedKVCache.create(
            layout,
            layers=self.config.num_layers,
            batch=batch,
            max_tokens=max_tokens,
            scales=scales,
            has_rotary_lengths=self.config.scaling_by_length is not None,
        )

    def create_pages(
        self, pages: int, sequences: int, format: KVFormat | str, page_size: int = 128
    ) -> tuple[KVPages, ...]:
        """Empty pages of each layer, as those of `create_cache`, that belong to no sequence yet.

        pages: their number. sequences: the number of residuals, for formats with blocks.
        """
        layout, scales = self._cache_layout(format, page_size)
        return create_pages(
            layout,
            layers=self.config.num_layers,
            pages=pages,
            sequences=sequences,
            scales=scales,
        )

    def _cache_layout(
        self, format: KVFormat | str, page_size: int
    ) -> tuple[KVLayout, jax.Array | None]:
        """The layout of the model's cache, and the model's cache_scales if the format uses them."""
        config, scales, format = self.config, None, KVFormat.of(format)
        if self.cache_scales is not None:
            found = as_array("cache_scales", self.cache_scales.get_value())
            if found.ndim == {"head": 3, "static": 4}.get(format.scaling or ""):
                scales = found
            elif format.scaling == "head":
                warnings.warn(
                    f"the model's cache_scales are for channels, and {format} has scales of heads, "
                    f"which are 1 now: measure them with mpjax.calibrate_cache for {format}",
                    stacklevel=3,
                )
        layout = KVLayout(
            config.num_kv_heads, config.head_dim, format, page_size, dtype=config.dtype
        )
        return layout, scales

    def angles(
        self, positions: jax.Array, rope: str = "global", lengths: jax.Array | None = None
    ) -> jax.Array:
        """Angles of the rotary embedding, float32 [..., head dim / 2].

        positions: int32 [batch, tokens], or varlen [tokens]. rope: of the layers that they are for.
        lengths: on which some scalings depend: rotary lengths with which sequences are read, int32
            that broadcast to the positions; by default the number of tokens.
        """
        if self.config.scaling_by_length is not None:
            read = positions.shape[-1] if lengths is None else lengths
            lengths = jnp.maximum(read, positions + 1)
        frequencies = rotary.frequencies(self.config, rope, 0 if lengths is None else lengths)
        angles = positions[..., None].astype(jnp.float32)
        return angles * jax.lax.broadcast_to_rank(frequencies, angles.ndim)

    def angles_by_rope(
        self, positions: jax.Array, lengths: jax.Array | None = None
    ) -> dict[str, jax.Array]:
        """The angles of each rotary embedding that layers have, by its kind; see `angles`."""
        ropes = dict.fromkeys(layer.attention.rope for layer in self.config.layers)
        return {rope: self.angles(positions, rope, lengths) for rope in ropes}

    def embed(self, tokens: jax.Array) -> jax.Array:
        """The residual stream before the first layer, [batch, tokens, hidden].

        tokens: int [batch, tokens]. Raises ValueError as calling the model does.
        """
        return self._look_up(self._read_tokens(tokens))

    def _look_up(self, tokens: jax.Array) -> jax.Array:
        look_up = functools.partial(tables.look_up, self.embedding, dtype=self.config.dtype)
        found, scale = self.vocabulary.embed(look_up, tokens), self.config.embedding_scale
        return found if scale is None else found * jnp.asarray(scale, found.dtype)

    def pack_table(self, path: str, format: WeightFormat | str) -> None:
        """Rounds a table, the `embedding` or the `head`, to nearest in a packed format, in place.

        A tied table is the `embedding`. Raises ValueError for another path, for a table that is
        packed already, and for weights that the format can't hold.
        """
        format = WeightFormat.of(format)
        config = self.config
        plain = [table for table in config.tables if table not in config.packed_tables]
        if not isinstance(path, str) or path not in plain:
            raise ValueError(
                f"path is {shown(path)}: expected a table that is not packed, of {plain}"
            )
        if not format.is_packed:
            raise ValueError(f"{format} is not packed: expected a format such as uint8:gK")
        try:
            packed = tables.pack(getattr(self, path), format)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        setattr(self, path, nnx.data(None))  # a Param can't become a module at once
        setattr(self, path, packed)
        both = *config.packed_tables, path
        self.config = dataclasses.replace(config, packed_tables=tuple(sorted(both)))

    def _create_table(self, path: str, rngs: nnx.Rngs) -> tables.Table:
        config = self.config
        shape = config.vocab_size, config.hidden_size
        return tables.create(path in config.packed_tables, shape, config.dtype, rngs)

    def _read_whole(self, tokens: Any) -> jax.Array:
        """Tokens of whole sequences as an array. Raises ValueError as `__call__` says."""
        tokens = self._read_tokens(tokens)
        require_positions(self.config, tokens.shape[1])
        return tokens

    def _read_tokens(self, tokens: Any) -> jax.Array:
        tokens, vocabulary = as_array("tokens", tokens), self.config.vocab_size
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            hint = "; a single sequence is tokens[None]" if tokens.ndim == 1 else ""
            raise ValueError(
                f"tokens are {shown(tokens)}: expected integers of shape [batch, tokens]{hint}"
            )
        if not are_between(tokens, 0, vocabulary - 1):
            raise ValueError(f"tokens must be from 0 to {vocabulary - 1}, the model's vocabulary")
        return tokens

    def _hidden(
        self,
        tokens: jax.Array,
        angles: Mapping[str, jax.Array],
        pages: tuple[KVPages, ...] | None,
        span: Span | RidersSpan | None,
    ) -> tuple[jax.Array, tuple[KVPages, ...]]:
        """Embeds tokens, runs all layers and the final norm.

        tokens: int [batch, tokens]. angles: of each token, by the kind of rotary embedding.
        pages, span: every layer's part of the cache, and where the new tokens lie in it; both None
            for whole sequences without a cache.

        Returns the hidden states [batch, tokens, hidden], and the pages with the new keys and
        values, which are empty without a cache.
        """
        # A layer takes the sum of its predecessor's output as terms, which it adds to the residual
        # stream. Before the first layer, the embedding is the only term, and there is no residual.
        terms = self._look_up(tokens)[None]
        residual = None
        written = []
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{index}"):
                layer_pages = pages[index] if pages else None
                turned = angles[layer.rope]
                terms, residual, layer_pages = _apply(
                    plan_conditions(), layer, terms, residual, turned, layer_pages, span
                )
                if layer_pages is not None:
                    written.append(layer_pages)
        _, hidden = self.norm.add(terms, residual, None)
        assert isinstance(hidden, jax.Array)
        return hidden, tuple(written)

    def _logits(self, hidden: jax.Array) -> jax.Array:
        with jax.named_scope("head"):
            table = self.embedding if self.head is None else self.head
            found = tables.logits(table, hidden)
            if (scale := self.config.logit_scale) is not None:
                found = found * scale
            if (cap := self.config.logit_softcap) is not None:
                found = cap * jnp.tanh(found / cap)
            return self.vocabulary.mask(found)
