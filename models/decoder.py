"""The decoder that all families share: embedding, layers, final norm, head."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Hashable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.kernels import KVFormat, KVLayout, KVPages, PagedKVCache, Span
from mpjax.kernels.checks import are_between, as_array, is_known, require_type, shown
from mpjax.kernels.plans import conditions as plan_conditions
from mpjax.models import config_json, parameters
from mpjax.models.attention import Attention, GroupedQuerySpec
from mpjax.models.config import DecoderConfig, LayerSpec, SublayerSpec
from mpjax.models.config_checks import require_sound
from mpjax.models.layers import RMSNorm, rotary_frequencies
from mpjax.models.mlp import MLP, GatedMLPSpec
from mpjax.models.parameters import ArrayPlace, LinearPlace, Names


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, config: DecoderConfig, spec: LayerSpec, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)
        self.attention: Attention = spec.attention.build(config, rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)
        self.mlp = spec.mlp.build(config, rngs)

    def __call__(
        self,
        terms: jax.Array,
        residual: jax.Array | None,
        angles: jax.Array,
        pages: KVPages | None,
        span: Span | None,
    ) -> tuple[jax.Array, jax.Array, KVPages | None]:
        """Maps a residual stream and terms to add to it to the next of both; see Attention.

        terms: [splits, batch, tokens, hidden]; residual: [batch, tokens, hidden], or None.
        Whoever normalises next adds the terms: one pass over the stream instead of two. With a
        cache, where no gradient is wanted, 8-bit activations are rounded on the way, too.
        """
        cached = span is not None
        mlp: MLP = self.mlp
        format = self.attention.qkv.activations if cached else None
        residual, x = self.attention_norm.add(terms, residual, format)
        attended, pages = self.attention.attend(x, angles, pages, span)
        terms = self.attention.output.terms(attended)
        format = mlp.activations if cached else None
        residual, x = self.mlp_norm.add(terms, residual, format)
        return mlp.terms(x, quantized=cached), residual, pages

    def inputs(
        self, hidden: jax.Array, angles: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The next residual stream, and what each linear map reads, by paths.

        hidden: the residual stream [batch, tokens, hidden], of whole sequences from position 0.
        angles: float32 [batch, tokens, head dim / 2], of the rotary embedding.
        """
        mlp: MLP = self.mlp
        x = self.attention_norm(hidden)
        attended, _ = self.attention.attend(x, angles, None, None)
        found = {"attention.qkv": x, "attention.output": attended}
        hidden = hidden + self.attention.output(attended)
        x = self.mlp_norm(hidden)
        found |= {f"mlp.{path}": read for path, read in mlp.inputs(x).items()}
        return hidden + mlp.terms(x, quantized=False).sum(0).astype(hidden.dtype), found


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _apply(
    plans: Hashable, layer: DecoderLayer, *arguments: Any
) -> tuple[jax.Array, jax.Array, KVPages | None]:
    """The layer, traced and lowered once for all that are alike: kernels make that slow.

    plans: what its products' plans depend on. A trace is kept for as long as that is the same.
    """
    return layer(*arguments)


class CacheScales(nnx.Variable):
    """Scales of keys and values, measured once, that a cache is given; no parameter to train."""


class Decoder(nnx.Module):
    """A causal language model; families subclass it to read their configuration and name tensors.

    Calling it is an ordinary forward pass over whole sequences, differentiable; `step` is the one
    function behind prefill and decoding, pure in (parameters, tokens, cache).

    names: what a family's tensors are called in Hugging Face's files; see `parameters.NAMES`.
    specs: the kinds of attentions and MLPs that a family's layers may have.
    cache_scales: CacheScales of float32 [layers, 2, KV heads] for FP8, or [layers, 2, KV heads,
        head dim] for 8s, keys first, or None; a checkpoint or a calibration brings them.
    """

    names: ClassVar[Names] = parameters.NAMES
    specs: ClassVar[tuple[type[SublayerSpec], ...]] = (GroupedQuerySpec, GatedMLPSpec)

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        require_type("config", config, DecoderConfig)
        require_type("rngs", rngs, nnx.Rngs, hint=", such as nnx.Rngs(0)")
        require_sound(config)
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        initial = nnx.initializers.normal(0.02)
        self.embedding = nnx.Param(initial(rngs.params(), shape, jnp.dtype(config.dtype)))
        self.layers = nnx.List([DecoderLayer(config, spec, rngs) for spec in config.layers])
        self.cache_scales: CacheScales | None = nnx.data(None)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)
        tied = config.tie_word_embeddings
        self.head = (
            None if tied else nnx.Param(initial(rngs.params(), shape, jnp.dtype(config.dtype)))
        )  # [vocabulary, hidden], as the embedding

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """The configuration in a Hugging Face `config.json` of this family, checked.

        Raises ConfigError, naming the key, for what is missing, not supported, or unsound.
        """
        config = cls.read_config(hf)
        require_sound(config, config_json.WHERE, config_json.field_names(hf))
        return config

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """What a family's `config.json` says; `config_from_hf` checks what fits together."""
        raise NotImplementedError(f"{cls.__name__} does not read config.json; its subclasses do")

    @classmethod
    def array_places(cls, config: DecoderConfig) -> list[ArrayPlace]:
        """Where all parameters outside linear maps lie, in the module and in files."""
        return parameters.array_places(config, cls.names)

    @classmethod
    def linear_places(cls, config: DecoderConfig) -> list[LinearPlace]:
        """Where all linear maps of the layers lie, in the module and in files."""
        return parameters.linear_places(config, cls.names)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits float32 [batch, tokens, vocabulary] of every position of int [batch, tokens].

        Raises ValueError for another shape or dtype, for more tokens than the model has positions,
        under `jit`, too, and, where values are known, for tokens that the vocabulary lacks.
        """
        tokens = self._read_tokens(tokens)
        _require_positions(self.config, tokens.shape[1])
        starts = jnp.zeros(tokens.shape[0], jnp.int32)
        hidden, _ = self._hidden(tokens, starts, None, None)
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
        """Adds tokens to the cache and predicts what follows each sequence.

        tokens: int [batch, tokens], padded on the right; counts: int32 [batch], the real ones.
        fresh: the cache is known to be empty (static): attention then reads the prompt itself.
        every_position: predict what follows each of the tokens, not only the last (static).

        In formats with blocks (KV4c, K4cV4c, KV2) new tokens see those before them in the cache's
        codes where a block ended between them, and in 16 bits else: what is predicted is that of
        single tokens as long as none of the steps goes past the end of a block.

        Raises ValueError for shapes and dtypes that don't fit and, where values are known, for
        tokens that the vocabulary lacks, more of them than the cache has room for or the model
        positions, counts that tokens don't have, and a cache that is not fresh; under `jit` the
        caller sees to that, and what doesn't fit in the cache is not written.

        Returns logits float32 and the next cache. Logits are [batch, vocabulary], after the last
        real token, or with every_position [batch, tokens, vocabulary].
        """
        tokens, counts = self._read_tokens(tokens), as_array("counts", counts)
        require_type("cache", cache, PagedKVCache, hint=", as model.create_cache makes it")
        if len(cache.layers) != self.config.num_layers:
            raise ValueError(
                f"the cache is of {len(cache.layers)} layers, and the model has "
                f"{self.config.num_layers}: create it with model.create_cache"
            )
        _require_counts(counts, tokens)
        cache.require_room(counts)
        if fresh:
            _require_empty(cache)
        if is_known((cache.lengths, counts)):
            ends = np.asarray(cache.lengths) + np.asarray(counts)
            _require_positions(self.config, int(ends.max()))
        span = Span(cache.block_tables, cache.lengths, counts, fresh)
        hidden, layers = self._hidden(tokens, cache.lengths, cache.layers, span)
        if not every_position:
            last = jnp.maximum(counts - 1, 0)
            hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
        cache = dataclasses.replace(cache, layers=layers, lengths=cache.lengths + counts)
        return self._logits(hidden), cache

    def create_cache(
        self, batch: int, max_tokens: int, format: KVFormat | str, page_size: int = 128
    ) -> PagedKVCache:
        """An empty cache that fits this model, with its scales if they are those of the format.

        batch: sequences. max_tokens: of each, rounded up to whole pages. format, page_size: as for
        KVLayout; page_size is the tokens in a page: 16, 32, 64, 128 or 256.

        Warns where a format of heads' scales finds those of channels: its own are 1 then.
        """
        config, scales, format = self.config, None, KVFormat.of(format)
        if self.cache_scales is not None:
            found = as_array("cache_scales", self.cache_scales.get_value())
            if found.ndim == {"head": 3, "static": 4}.get(format.scaling or ""):
                scales = found
            elif format.scaling == "head":
                warnings.warn(
                    f"the model's cache_scales are of channels, and {format} has scales of heads, "
                    f"which are 1 now: measure them with mpjax.calibrate_cache for {format}",
                    stacklevel=2,
                )
        layout = KVLayout(
            config.num_kv_heads, config.head_dim, format, page_size, dtype=config.dtype
        )
        return PagedKVCache.create(
            layout,
            layers=config.num_layers,
            batch=batch,
            max_tokens=max_tokens,
            scales=scales,
        )

    def angles(self, positions: jax.Array) -> jax.Array:
        """Angles of the rotary embedding, float32 [batch, tokens, head dim / 2].

        positions: int32 [batch, tokens].
        """
        config = self.config
        frequencies = rotary_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        return positions[..., None].astype(jnp.float32) * frequencies[None, None]

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
        starts: jax.Array,
        pages: tuple[KVPages, ...] | None,
        span: Span | None,
    ) -> tuple[jax.Array, tuple[KVPages, ...]]:
        positions = starts[:, None] + jnp.arange(tokens.shape[1])[None]  # [batch, tokens]
        angles = self.angles(positions)
        terms = jnp.take(self.embedding.get_value(), tokens, axis=0)[None]
        residual = None
        written = []
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{index}"):
                layer_pages = pages[index] if pages else None
                terms, residual, layer_pages = _apply(
                    plan_conditions(), layer, terms, residual, angles, layer_pages, span
                )
                if layer_pages is not None:
                    written.append(layer_pages)
        _, hidden = self.norm.add(terms, residual, None)
        assert isinstance(hidden, jax.Array)
        return hidden, tuple(written)

    def _logits(self, hidden: jax.Array) -> jax.Array:
        head = (self.embedding if self.head is None else self.head).get_value()
        with jax.named_scope("head"):
            return jnp.einsum("...h,vh->...v", hidden, head, preferred_element_type=jnp.float32)


def _require_positions(config: DecoderConfig, tokens: int) -> None:
    if tokens > config.max_position_embeddings:
        raise ValueError(
            f"a sequence of {tokens} tokens would pass the {config.max_position_embeddings} "
            "positions of this model: shorten it, or load the model with max_positions"
        )


def _require_counts(counts: jax.Array, tokens: jax.Array) -> None:
    batch, most = tokens.shape
    if counts.shape != (batch,) or not jnp.issubdtype(counts.dtype, jnp.integer):
        raise ValueError(
            f"counts are {shown(counts)}: expected integers of shape ({batch},), one for each "
            "sequence"
        )
    if not are_between(counts, 0, most):
        raise ValueError(
            f"counts are {np.asarray(counts).tolist()}; each must be from 0 to {most}, the tokens"
        )


def _require_empty(cache: PagedKVCache) -> None:
    if not are_between(cache.lengths, 0, 0):
        found = np.asarray(cache.lengths).tolist()
        raise ValueError(
            f"the cache holds {found} tokens, and fresh says that it is empty: "
            "leave fresh out, or create another cache"
        )
