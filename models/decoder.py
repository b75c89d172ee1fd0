"""The decoder that all families share: embedding, layers, final norm, head."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.kernels import WeightFormat, rms_norm
from mpjax.kernels.checks import as_array, is_known, require_type, shown
from mpjax.kernels.kv_cache.cache import require_room
from mpjax.kernels.kv_cache.varlen import tokens_of
from mpjax.kernels.plans import conditions as plan_conditions
from mpjax.models import config_json, config_keys, parameters, rotary, step_checks, tables
from mpjax.models.cache_scales import CacheScales
from mpjax.models.config import DecoderConfig, SublayerSpec
from mpjax.models.config_checks import require_sound
from mpjax.models.deterministic import in_own_mode
from mpjax.models.drafts import Drafts
from mpjax.models.layer import DecoderLayer, apply, stream_of
from mpjax.models.layers import Linear, RMSNorm
from mpjax.models.low_rank import LowRank, read_numbers
from mpjax.models.parameters import ArrayPlace, LinearPlace, Names
from mpjax.models.per_layer import PerLayerInputs, contexts
from mpjax.models.routes import Routes
from mpjax.models.specs import SPECS
from mpjax.models.state import WHOLE, DecoderCache, StepContext
from mpjax.models.streams import StreamMaps
from mpjax.models.vocabulary import Vocabulary
from mpjax.models.watch import (
    Capture,
    Captured,
    Steer,
    Watch,
    put_captured,
    read_capture,
    read_steer,
    watching,
)
from mpjax.models.window import Window


class Decoder(Drafts):
    """A causal language model. A family subclasses it, reads config.json and names its tensors.

    Calling it is a differentiable forward pass over whole sequences; `step` is the function behind
    prefill and decoding, pure in (parameters, tokens, counts, cache).

    names, draft_names: of a family's tensors, as `parameters.NAMES`, and of its layer that drafts.
    specs: the classes of the specs of mixers and MLPs that a family's layers may have.
    spare: prefixes and suffixes of the names of tensors in files that the decoder ignores.
    has_spare_layers: whether files may hold more layers than the decoder, such as MTP layers.
    renamed: parts of the names of tensors in some of the family's files → the same in `names`.
    defaults, neutral, aliases: of keys in config.json; see `config_keys.complete`.
    cache_scales: CacheScales of float32 [layers, 2 (keys, values), KV heads] for FP8, or [layers,
        2, KV heads, head dim] for 8s; or None. They come from a checkpoint or a calibration.
    mesh: the devices among which the model is divided (`sharded.py`); None for a whole model.
    deterministic: the KV format of caches in deterministic mode (`deterministic.py`); None without.
    axis: in one device's share of a divided model, the mesh axis of the devices; else None.
    embedding_adapter, head_adapter: adapters' changes of the tables; None without. per_layer: the
    layers' inputs, with per-layer embeddings. streams: the maps of several residual streams.
    """

    embedding_adapter: LowRank | None = None
    head_adapter: LowRank | None = None
    mesh: jax.sharding.Mesh | None = None
    names: ClassVar[Names] = parameters.NAMES
    draft_names: ClassVar[Names] = {}
    specs: ClassVar[tuple[type[SublayerSpec], ...]] = SPECS
    spare: ClassVar[tuple[str, ...]] = ()
    has_spare_layers: ClassVar[bool] = False
    renamed: ClassVar[Mapping[str, str]] = {}
    defaults: ClassVar[Mapping[str, Any]] = {}
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    aliases: ClassVar[Mapping[str, str]] = {}

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        require_type("config", config, DecoderConfig)
        require_type("rngs", rngs, nnx.Rngs, hint=", such as nnx.Rngs(0)")
        require_sound(config)
        self.config = config
        self.axis: str | None = None
        self.embedding = self._create_table(parameters.EMBEDDING, rngs)
        self.layers = nnx.List([DecoderLayer(config, spec, rngs) for spec in config.layers])
        has_inputs, has_streams = (config.in_all_layers(each) for each in ("per_layer", "streams"))
        self.per_layer = nnx.data(PerLayerInputs(config, rngs) if has_inputs else None)
        self.streams = nnx.data(StreamMaps(config, rngs) if has_streams else None)
        self.cache_scales: CacheScales | None = nnx.data(None)
        self.norm = RMSNorm.of(config, config.hidden_size)
        tied, labels = config.tie_word_embeddings, (config.labels or 0, config.hidden_size)
        self.head = None if tied else self._create_table(parameters.HEAD, rngs)
        bias = jnp.zeros(config.vocab_size, config.dtype)
        has_bias = config.head_bias and config.predicts
        self.head_bias = nnx.data(nnx.Param(bias) if has_bias else None)
        self.score = nnx.data(nnx.Param(jnp.zeros(labels, config.dtype)) if labels[0] else None)

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """The configuration in a Hugging Face `config.json` of this family, checked.

        Raises ConfigError, which names the key, for a missing key, an unsupported value, and values
        that don't fit together.
        """
        hf = config_keys.complete(hf, cls.defaults, cls.neutral, cls.aliases)
        config = cls.read_config(hf)
        require_sound(config, config_keys.WHERE, config_json.field_names(hf))
        return config

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads the family's `config.json`, with defaults added; `config_from_hf` checks it.

        Raises ConfigError, which names the key.
        """
        raise NotImplementedError(f"{cls.__name__} does not read config.json; its subclasses do")

    @classmethod
    def array_places(cls, config: DecoderConfig) -> list[ArrayPlace]:
        """Places of all parameters outside linear maps, in the module and in files."""
        return parameters.array_places(config, cls.names, cls.draft_names)

    @classmethod
    def linear_places(cls, config: DecoderConfig) -> list[LinearPlace]:
        """Places of all linear maps, in the module and in files: of layers, and packed tables."""
        return parameters.linear_places(config, cls.names, cls.draft_names)

    def put_array(self, place: ArrayPlace, array: Any, rows: Window | None = None) -> None:
        """Assigns an array to its place. rows: the window that `array` is of a table; None: all."""
        place.assign(self, array)

    def put_linears(
        self, place: LinearPlace, parts: Sequence[Linear], windows: Sequence[Window] | None = None
    ) -> None:
        """Assigns linear maps to their place.

        windows: the channels of each map in the files that `parts` contain; None for all.
        """
        place.assign(self, parts)

    def windows(self, place: LinearPlace) -> list[Window] | None:
        """The channels that this process needs of each map of a place in the files; None: all."""
        return None

    def rows(self, place: ArrayPlace) -> Window | None:
        """The rows of a table that this process needs; None: all."""
        return None

    def place_change(self, path: str, change: LowRank) -> LowRank:
        """Puts an adapter's change of the maps at a path, or a stack, on the model's devices."""
        return change.map(lambda array: jnp.asarray(array, self.config.dtype))

    def put_cache_scales(self, scales: Any) -> None:
        """Assigns the scales of the whole model's cache."""
        self.cache_scales = CacheScales(scales)

    def limit_positions(self, positions: int) -> None:
        """Sets the most tokens that a sequence may have."""
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

    def __call__(self, tokens: jax.Array, adapters: jax.Array | None = None) -> jax.Array:
        """Logits float32 [batch, tokens, vocabulary] after every token of int [batch, tokens].

        adapters: int [batch], the adapter of each sequence, as in StepContext; None for none.

        Raises ValueError for another shape or dtype and for more tokens than the model has
        positions, also under `jit`; outside `jit` also for token ids outside the vocabulary.
        """
        context = self._whole(tokens, adapters)
        logits, _ = self.forward(as_array("tokens", tokens), context, (), every_position=True)
        return logits[..., : self.config.vocab_size]

    def inspect(
        self,
        tokens: jax.Array,
        adapters: jax.Array | None = None,
        *,
        capture: Capture = MappingProxyType({}),
        steer: Steer | Sequence[Steer] = (),
    ) -> tuple[jax.Array, Captured]:
        """The logits of a call, and its layers' activations; differentiable as a call.

        tokens, adapters: as for a call.
        capture: layers by point, such as {"residual": [3, 7]}: "residual", the stream that enters a
            layer, or with the number of layers as index the stream after the last; "attention" and
            "mlp", the outputs that are added to the stream; "router", each token's experts, int32.
        steer: changes of activations, applied in order; see Addition and Replacement. Captured
            activations include the changes.

        Returns logits as a call, and arrays [batch, tokens, ...] by point and layer. Raises
        ValueError as a call, for unknown points and layers, and for a divided model.
        """
        tokens, context = as_array("tokens", tokens), self._whole(tokens, adapters)
        captured, steer = read_capture(self, capture), read_steer(self, steer)
        watch = Watch(captured, steer, context.positions(tokens.shape))
        context = dataclasses.replace(context, watch=watch)
        logits, _ = self.forward(tokens, context, (), every_position=True)
        return logits[..., : self.config.vocab_size], watch.found

    def hidden(
        self, tokens: jax.Array, counts: jax.Array | None = None, routes: Routes | None = None
    ) -> jax.Array:
        """Hidden states [batch, tokens, hidden] after the final norm; errors are as for calls.

        counts: int32 [batch], the tokens of each row before its padding; None for all.
        routes: the experts of each token in some layers, from `read_routes`; None: routers choose.
        """
        whole = dataclasses.replace(self._whole(tokens, None), counts=counts, routes=routes)
        return self._hidden(as_array("tokens", tokens), whole, ())[0]

    def _whole(self, tokens: Any, adapters: jax.Array | None) -> StepContext:
        """The context of whole sequences. Raises ValueError for arrays that are not token ids."""
        tokens = step_checks.read_tokens(self.config, tokens)
        step_checks.require_positions(self.config, tokens.shape[1])
        positions = jnp.cumsum(jnp.ones(tokens.shape, jnp.int32), 1) - 1
        own = None if adapters is None else read_numbers(self, adapters, len(tokens))
        angles = self.angles_by_rope(positions)
        return StepContext(angles, adapters=own, kv_format=self.deterministic)

    def step(
        self,
        tokens: jax.Array,
        counts: jax.Array,
        cache: DecoderCache,
        *,
        fresh: bool = False,
        every_position: bool = False,
        tentative: bool = False,
    ) -> tuple[jax.Array, DecoderCache]:
        """Adds tokens to the cache and computes the logits of the token after them.

        tokens: int [batch, tokens], padded on the right. counts: int32 [batch], each row's number
        of tokens without the padding.
        fresh: whether the cache is known to be empty (static); attention then uses the prompt's
        keys and values before they are quantised.
        every_position: whether to return logits after each token, not only the last (static).
        tentative: whether tokens may be removed again; then `settle` completes the cache (static).

        Returns float32 logits and the next cache. Logits are [batch, vocabulary], after each row's
        last token, or with every_position [batch, tokens, vocabulary].

        In KV formats with blocks (`KVFormat.block`) a new token attends to quantised earlier keys
        and values once their block is complete, and to 16-bit ones until then. A step of several
        tokens therefore gives the logits of steps of single tokens only if it does not cross the
        end of a block.

        With LongRoPE and dynamic scaling, a fresh step raises the cache's rotary lengths to counts.

        Raises ValueError for shapes and dtypes that don't fit. Outside `jit` it also raises for
        token ids outside the vocabulary, more tokens than the cache has room for or the model has
        positions, counts above the number of tokens, and a cache that is not empty despite `fresh`.
        Under `jit` the caller must ensure these; tokens without room in the cache are not written.
        """
        tokens, counts = self._read_step(tokens, counts, cache, fresh)
        positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1])[None]
        if (lengths := cache.rotary_lengths) is not None:
            lengths = jnp.maximum(lengths, counts) if fresh else lengths
            cache = dataclasses.replace(cache, rotary_lengths=lengths)
            lengths = lengths[:, None]
        angles = self.angles_by_rope(positions, lengths)
        fresh = fresh and self.deterministic is None
        context = StepContext.of(cache, counts, angles, fresh=fresh)
        context = dataclasses.replace(context, tentative=tentative)
        return self._advance(tokens, context, cache, every_position=every_position)

    def _advance(
        self, tokens: jax.Array, context: StepContext, cache: DecoderCache, *, every_position: bool
    ) -> tuple[jax.Array, DecoderCache]:
        context = watching(cache, context, tokens)
        logits, layers = self.forward(tokens, context, cache.layers, every_position=every_position)
        assert context.counts is not None
        lengths, captured = cache.lengths + context.counts, put_captured(cache, context)
        cache = dataclasses.replace(cache, layers=layers, lengths=lengths, captured=captured)
        return logits, cache

    def forward(
        self,
        tokens: jax.Array,
        context: StepContext,
        states: tuple[Any, ...],
        *,
        every_position: bool,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """All layers and the head: the function behind calls and steps. Nothing is checked.

        tokens: int [batch, tokens], or varlen [tokens]. context: their positions and sequences.
        states: of each layer; () without a cache. every_position: whether to return logits after
        each token, or only after the last one of each sequence (static).

        Returns logits float32 [..., columns], and the states with these tokens.
        """
        hidden, states = self._hidden(tokens, context, states)
        context = dataclasses.replace(context, watch=None)
        if every_position:
            return self._logits(hidden, context), states
        return self._logits(context.last(hidden), context.of_last), states

    def logits(self, hidden: jax.Array, *, normed: bool = False) -> jax.Array:
        """Logits float32 [..., vocabulary] of hidden states; normed: as `hidden` returns them."""
        return self._logits(hidden if normed else self.norm(as_array("hidden", hidden)), WHOLE)

    def _read_step(
        self, tokens: Any, counts: Any, cache: DecoderCache, fresh: bool
    ) -> tuple[jax.Array, jax.Array]:
        """The tokens and counts of a step as arrays. Raises ValueError as `step` documents."""
        tokens = step_checks.read_tokens(self.config, tokens)
        counts = as_array("counts", counts)
        step_checks.require_cache(self.config, cache)
        step_checks.require_counts(counts, tokens)
        require_room(cache.lengths, cache.capacity, counts)
        if fresh:
            step_checks.require_empty(cache)
        if is_known((cache.lengths, counts)):
            ends = np.asarray(cache.lengths) + np.asarray(counts)
            step_checks.require_positions(self.config, int(ends.max()))
        return tokens, counts

    def step_varlen(
        self,
        tokens: jax.Array,
        counts: jax.Array,
        cache: DecoderCache,
        *,
        encoded: jax.Array | None = None,
        every_position: bool = False,
    ) -> tuple[jax.Array, DecoderCache]:
        """Adds varlen tokens to the cache, as `step` adds padded ones, for use under `jit`.

        tokens: int32 [tokens], the sequences' tokens one after another, then padding.
        counts: int32 [batch], the number of each sequence's new tokens.
        encoded: as in Span, for sequences that begin after a shared prefix.
        every_position: whether to return logits after each token (static).

        New tokens attend to earlier tokens, and to one another, through the cache in its format. In
        formats with blocks they have the logits of steps of single tokens if no sequence's tokens
        cross the end of a block.

        Returns float32 logits and the next cache. Logits are [batch, vocabulary], after each
        sequence's last token and undefined for sequences without new tokens; or with
        every_position [tokens, vocabulary]. Nothing is checked.
        """
        found, lengths = tokens_of(counts, len(tokens)), cache.rotary_lengths
        positions = cache.lengths[found.sequence] + found.number
        angles = self.angles_by_rope(
            positions, None if lengths is None else lengths[found.sequence]
        )
        context = StepContext.of(cache, counts, angles, encoded=encoded)
        return self._advance(tokens, context, cache, every_position=every_position)

    def angles(
        self, positions: jax.Array, rope: str = "global", lengths: jax.Array | None = None
    ) -> jax.Array:
        """Angles of the rotary embedding, float32 [..., head dim / 2].

        positions: int32 [batch, tokens], or varlen [tokens]. rope: the kind of the layers.
        lengths: the rotary lengths with which sequences were prefilled, for scalings by length:
            int32 that broadcasts to the positions; by default the number of tokens.
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
        """The angles of each kind of rotary embedding that the layers have; see `angles`."""
        return {rope: self.angles(positions, rope, lengths) for rope in self.config.ropes}

    def embed(self, tokens: jax.Array) -> jax.Array:
        """The residual stream before the first layer, [batch, tokens, hidden].

        tokens: int [batch, tokens]. Raises ValueError as calling the model does.
        """
        return self._look_up(step_checks.read_tokens(self.config, tokens), WHOLE)

    def _look_up(self, tokens: jax.Array, context: StepContext) -> jax.Array:
        look_up = functools.partial(tables.look_up, self.embedding, dtype=self.config.dtype)
        found, scale = self.vocabulary.embed(look_up, tokens), self.config.embedding_scale
        if self.embedding_adapter is not None:
            change = self.embedding_adapter.look_up(tokens, context)
            found = (found.astype(jnp.float32) + change).astype(found.dtype)
        if self.config.embedding_norm:
            ones = jnp.ones(self.config.hidden_size)
            found = rms_norm(found, ones, self.config.rms_norm_eps).astype(found.dtype)
        return found if scale is None else found * jnp.asarray(scale, found.dtype)

    def pack_table(self, path: str, format: WeightFormat | str) -> None:
        """Rounds a table, the `embedding` or the `head`, to nearest in a packed format, in place.

        A tied table is the `embedding`. Raises ValueError for another path, for a table that is
        packed already, and for weights that the format can't represent.
        """
        format = WeightFormat.of(format)
        plain = [table for table in self.config.tables if table not in self.config.packed_tables]
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
        setattr(self, path, nnx.data(None))  # NNX can't replace a Param by a module directly
        setattr(self, path, packed)
        both = *self.config.packed_tables, path
        self.config = dataclasses.replace(self.config, packed_tables=tuple(sorted(both)))

    def _create_table(self, path: str, rngs: nnx.Rngs) -> tables.Table:
        config = self.config
        shape = config.vocab_size, config.hidden_size
        return tables.create(path in config.packed_tables, shape, config.dtype, rngs)

    @in_own_mode
    def _hidden(
        self, tokens: jax.Array, context: StepContext, states: tuple[Any, ...]
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Embeds tokens, and runs all layers and the final norm; arguments as for `forward`.

        Returns the hidden states [..., hidden] and the next states, which are () without a cache.
        """
        # A layer takes its predecessor's output as terms, whose sum it adds to the residual stream.
        # Before the first layer, the embedding is the only term, and there is no residual stream.
        watch, context = context.watch, dataclasses.replace(context, watch=None)
        terms = self._look_up(tokens, context)[None]
        residual, written, depth, seen = None, list[Any](), self.config.depth, list[jax.Array]()
        inputs = None if self.per_layer is None else self.per_layer(tokens, terms[0])
        terms = terms if self.streams is None else self.streams.widened(terms)
        own, sources = contexts(self.config, context, inputs), self.config.sources
        for index, layer in enumerate(self.layers[:depth]):
            with jax.named_scope(f"layer_{index}"):
                self._see(seen, index, terms, residual)
                state = states[index] if states else None
                state = state if (source := sources[index]) is None else written[source]
                if watch is not None and watch.touches(index):
                    stream = watch.see("residual", index, stream_of(terms, residual))
                    found = layer.watched(index, stream, own[index], state, watch)
                else:
                    found = apply(plan_conditions(), layer, terms, residual, own[index], state)
                terms, residual, state = found
                written.append(state if source is None else ())
        self._see(seen, depth, terms, residual)
        if watch is not None and watch.touches(depth):
            stream = watch.see("residual", depth, stream_of(terms, residual))
            terms, residual = stream[None], None
        terms = terms if self.streams is None else self.streams.united(terms)
        _, hidden = self.norm.add(terms, residual, None)
        assert isinstance(hidden, jax.Array)
        if len(states) > depth:
            with jax.named_scope("draft"):
                written.append(self._remember(tokens, hidden, seen, context, states[-1]))
        return hidden, tuple(written) if states else ()

    @in_own_mode
    def _logits(self, hidden: jax.Array, context: StepContext) -> jax.Array:
        if not self.config.predicts:
            raise ValueError(f"this model predicts no tokens: {config_keys.INSTEAD}")
        with jax.named_scope("head"):
            table = self.embedding if self.head is None else self.head
            found = tables.logits(table, hidden)
            if self.head_adapter is not None:
                found = self.head_adapter.add(found, hidden, context)
            if self.head_bias is not None:
                bias = self.head_bias.get_value().astype(found.dtype)
                found += jax.lax.broadcast_to_rank(bias, found.ndim)
            if (scale := self.config.logit_scale) is not None:
                found = found * scale
            if (cap := self.config.logit_softcap) is not None:
                found = cap * jnp.tanh(found / cap)
            return self.vocabulary.mask(found)
