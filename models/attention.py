"""The attention layer, with or without a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.kernels import (
    ActivationBlocks,
    HeadNorms,
    KVPages,
    Masks,
    Rotation,
    Span,
    append,
    paged_attention,
    prefill_attention,
    rms_norm,
    rotate,
    rotate_and_append,
)
from mpjax.kernels.checks import as_array, require_type
from mpjax.models import own_pages, rotary
from mpjax.models.bidirectional import whole_attention
from mpjax.models.config import AttentionSpec, DecoderConfig
from mpjax.models.kv_state import KVState
from mpjax.models.layers import (
    Activations,
    FusedLinear,
    Linear,
    RMSNorm,
    Rounding,
    as_activations,
)
from mpjax.models.maps import Fold, LinearMaps
from mpjax.models.mixer import gated, joined_heads, means_of_squares
from mpjax.models.share import Cut, HeadShares, Share
from mpjax.models.state import SequenceState, StateSpec, StepContext


@dataclasses.dataclass(frozen=True)
class GroupedQuerySpec(AttentionSpec):
    """Grouped-query attention with RoPE.

    qkv_bias: whether the query, key and value maps have biases. output_bias: whether the output
    map has one. qk_norm: whether an RMSNorm is applied to each query and key head before RoPE.
    joint_norm: whether that norm is one over the channels of all heads (OLMo 2).
    scale, softcap: of the scores; see Masks.
    sinks: whether each query head has a learned score without a value in its softmax (gpt-oss).
    interleaved: whether RoPE rotates pairs of neighbouring channels (GLM-4) instead of pairs that
        are half of the rotated channels apart.
    norm_after: whether QK-norm follows RoPE, which then rotates all channels (Hunyuan).
    growth, growth_context: queries at position p are multiplied by
        1 + growth · ln(1 + ⌊p / growth_context⌋) (Ministral 3); growth None: they are not.
    growth_from_one: whether p counts from 1 there (Llama 4).
    bidirectional: whether tokens also attend to later tokens; see `whole_attention`.
    factors: of queries, keys and values, biases included; () for none.
    output_gate: whether each query head's output is multiplied by the sigmoid of a gate, whose map
        is the second half of the head's query map (Qwen3-Next).
    gate_map: whether that gate has a map of its own instead (Muse Glimmer).
    norm_weights: whether QK-norm has weights.
    chunked: whether tokens attend to their own chunk of `window` positions; see Masks.
    heads, kv_heads, head_dim: the layer's own numbers of query heads, of KV heads and of channels
        of a head (Gemma 4); None: the configuration's. heads and kv_heads come together.
    keys_as_values: whether there is no value map: values are the outputs of the key map.
    value_norm: whether an RMSNorm without weight is applied to each value head, beside QK-norm.
    reads_back: how many layers earlier the layer is whose keys and values this layer reads, without
        maps to its own; None: it has its own.
    """

    kind: ClassVar[str] = "grouped_query"
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    joint_norm: bool = False
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    interleaved: bool = False
    norm_after: bool = False
    growth: float | None = None
    growth_context: int = 8192
    bidirectional: bool = False
    factors: tuple[float, ...] = ()
    output_gate: bool = False
    gate_map: bool = False
    norm_weights: bool = True
    chunked: bool = False
    growth_from_one: bool = False
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    keys_as_values: bool = False
    value_norm: bool = False
    reads_back: int | None = None

    def sizes(self, config: DecoderConfig) -> tuple[int, int, int]:
        """The numbers of query heads, of KV heads, and of channels of a head."""
        heads, kv_heads = self.heads or config.num_heads, self.kv_heads or config.num_kv_heads
        return heads, kv_heads, self.rotary_channels(config)

    def rotary_channels(self, config: DecoderConfig) -> int:
        """See MixerSpec."""
        return self.head_dim or config.head_dim

    @property
    def maps(self) -> int:
        """The number of maps of the input: to queries, and to the layer's own keys and values."""
        return 1 if self.reads_back is not None else 3 - self.keys_as_values

    def build(self, config: DecoderConfig, rngs: nnx.Rngs) -> Attention:
        """An Attention module with random weights."""
        return Attention(config, self, rngs)

    def state(self, config: DecoderConfig) -> StateSpec:
        """The keys and values of tokens, in pages; nothing if they are another layer's."""
        if self.reads_back is not None:
            return SequenceState(())
        _, heads, dim = self.sizes(config)
        return KVState(heads, dim, config.dtype, self.window)

    def linear_maps(self, config: DecoderConfig) -> tuple[LinearMaps, ...]:
        """Two products: query, key and value together (`qkv`), and `output`."""
        hidden = config.hidden_size
        heads, kv_heads, dim = self.sizes(config)
        query, key = heads * dim, kv_heads * dim
        asked = query * (1 + self.output_gate), key, key
        sizes = *asked[: self.maps], *[query] * self.gate_map
        return (
            LinearMaps(
                "qkv",
                tuple((hidden, size) for size in sizes),
                self.qkv_bias,
                factors=self.factors,
            ),
            LinearMaps("output", ((query, hidden),), self.output_bias),
        )

    def arrays(self, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
        """Shapes of the query and key norms' weights, and of the sinks, by path."""
        found: dict[str, tuple[int, ...]] = {}
        if self.qk_norm and self.norm_weights:
            query, key = self.norm_sizes(config)
            norms = {"query_norm.weight": (query,), "key_norm.weight": (key,)}
            found |= dict([*norms.items()][: self.maps])
        return found | ({"sinks": (self.sizes(config)[0],)} if self.sinks else {})

    def norm_sizes(self, config: DecoderConfig) -> tuple[int, int]:
        """The number of channels that one query norm, and one key norm, normalises."""
        heads, kv_heads, dim = self.sizes(config)
        return (heads * dim, kv_heads * dim) if self.joint_norm else (dim, dim)

    def why_unsound(self) -> str | None:
        """The reason why the fields don't fit together, or None if they do."""
        gated = self.output_gate or self.gate_map
        is_plain = self.qk_norm and self.norm_weights and not (self.joint_norm or self.norm_after)
        reads = self.reads_back is not None
        for are_set, names in (
            (self.output_gate and self.joint_norm, "output_gate and joint_norm are true"),
            (self.output_gate and self.gate_map, "output_gate and gate_map are true"),
            (self.joint_norm and (self.gate_map or not self.norm_weights), "joint_norm is true"),
            (self.gate_map and self.qkv_bias, "gate_map and qkv_bias are true"),
            (gated and bool(self.factors), "factors are set, and there is a gate"),
            (self.bidirectional and (self.sinks or self.chunked), "bidirectional is true"),
            (self.chunked and self.window is None, "chunked is true and window None"),
            (self.value_norm and not is_plain, "value_norm is true without a norm of each head"),
            (reads and (gated or self.growth or not is_plain), "reads_back is set"),
            (
                self.keys_as_values and (self.joint_norm or self.interleaved),
                "keys_as_values is true",
            ),
            (self.maps < 3 and (self.gate_map or bool(self.factors)), "values have no map"),
        ):
            if are_set:
                return f"{names}: no such attention is implemented"
        if (self.heads is None) != (self.kv_heads is None):
            return f"heads is {self.heads} and kv_heads {self.kv_heads}: expected both, or neither"
        if self.heads and self.kv_heads and self.heads % self.kv_heads:
            return f"heads is {self.heads}: expected a multiple of the {self.kv_heads} kv_heads"
        if self.head_dim is not None and self.head_dim % 2:
            return f"head_dim is {self.head_dim}: expected an even number"
        if len(self.factors) in (0, 3):
            return None
        return f"factors is {self.factors!r:.80}: expected three, of queries, keys and values"

    def folds(self, config: DecoderConfig) -> tuple[Fold, ...]:
        """The fold of values and output map: attention averages each value channel over tokens.

        There is none if values are normalised, or are keys or another layer's.
        """
        if self.value_norm or self.maps < 3:
            return ()
        heads, kv_heads, dim = self.sizes(config)
        each, gated = (kv_heads, heads // kv_heads, dim), self.output_gate or self.gate_map
        return (Fold("output", "qkv", 2, each, is_mixable=not gated),)

    def divide(self, count: int, units: Mapping[str, int]) -> GroupedQuerySpec:
        """The spec with a share of the layer's own heads; others are in the configuration."""
        if self.heads is None or self.kv_heads is None:
            return self
        heads, kv_heads = HeadShares(self.heads, self.kv_heads, count).local
        return dataclasses.replace(self, heads=heads, kv_heads=kv_heads)

    def cuts(self, config: DecoderConfig, local: GroupedQuerySpec, share: Share) -> dict[str, Cut]:
        """The outputs and sinks of a share's heads, and the matching inputs of the output map.

        A joint norm is cut to the weights of the share's heads.
        """
        heads, kv_heads, dim = self.sizes(config)
        own = HeadShares(heads, kv_heads, share.count).runs(share.number)
        query, key = (run.times(dim) for run in own)
        asked = query.times(1 + self.output_gate), key, key
        outputs = *asked[: self.maps], *[query] * self.gate_map
        found = {"qkv": Cut(outputs=outputs), "output": Cut(inputs=query)}
        if self.qk_norm and self.joint_norm:
            found["query_norm.weight"] = Cut(outputs=(query,))
            found["key_norm.weight"] = Cut(outputs=(key,))
        return found | ({"sinks": Cut(outputs=own[:1])} if self.sinks else {})


class Attention(nnx.Module):
    """Grouped-query attention with RoPE, optional biases and QK-norm; see GroupedQuerySpec."""

    def __init__(self, config: DecoderConfig, spec: GroupedQuerySpec, rngs: nnx.Rngs):
        qkv, output = spec.linear_maps(config)
        self.qkv = FusedLinear.create(qkv, config.dtype, rngs)
        self.output = Linear.create(
            output.shapes[0], bias=output.bias, dtype=config.dtype, rngs=rngs
        )
        query, key = spec.norm_sizes(config)
        has_weights = spec.qk_norm and spec.norm_weights
        self.query_norm = RMSNorm.of(config, query) if has_weights else None
        self.is_reader = spec.reads_back is not None  # of another layer's keys and values
        has_keys = has_weights and not self.is_reader
        self.key_norm = RMSNorm.of(config, key) if has_keys else None
        self.plain_norm = config.rms_norm_eps if spec.qk_norm and not has_weights else None
        self.joint_norm = spec.qk_norm and spec.joint_norm
        self.output_gate, self.gate_map = spec.output_gate, spec.gate_map
        self.joint_axis: str | None = None  # mesh axis that divides the heads
        self.joint_channels = query, key  # that a joint norm covers, on all devices
        *heads, self.head_dim = spec.sizes(config)
        self.heads = heads[0], heads[1]
        self.keys_as_values, self.value_norm = spec.keys_as_values, spec.value_norm
        self.masks = Masks(spec.scale, spec.window, spec.softcap, chunked=spec.chunked)
        self.rope, self.group = spec.rope, config.page_groups.index(spec.window)
        self.rotary_dim = config.rotary_dim or self.head_dim
        # A norm after RoPE removes any factor of queries and keys.
        factor = rotary.attention_factor(config, spec.rope)
        self.attention_factor = 1.0 if spec.qk_norm and spec.norm_after else factor
        self.norm_after = has_weights and spec.norm_after  # unweighted norms commute with RoPE
        self.growth = spec.growth, spec.growth_context, int(spec.growth_from_one)
        self.bidirectional = spec.bidirectional
        order = rotary.channel_order(self.rotary_dim, self.head_dim, spec.interleaved)
        self.order = None if order is None else tuple(order.tolist())  # arrays are not hashable
        zeros = jnp.zeros(self.heads[0], config.dtype) if spec.sinks else None
        self.sinks = nnx.data(None if zeros is None else nnx.Param(zeros))

    def __call__(
        self, x: Activations, context: StepContext, state: KVPages | None = None
    ) -> tuple[jax.Array, KVPages | None]:
        """Attention with its output map, for x [batch, tokens, hidden]; arguments as for `mix`.

        Returns an array of x's shape, and the state.
        """
        mixed, state = self.mix(x, context, state)
        return self.output(mixed, context), state

    def divide_norms(self, axis: str, heads: HeadShares) -> None:
        """Makes joint norms cover the heads of all devices of a mesh axis.

        A key head is counted once for each device with a copy of it.
        """
        self.joint_axis = axis
        keys = heads.kv_heads * heads.holders
        self.joint_channels = heads.heads * self.head_dim, keys * self.head_dim

    @property
    def activations(self) -> Rounding:
        """How the input of the query, key and value maps is rounded."""
        return self.qkv.activations

    def terms(self, mixed: Activations, context: StepContext) -> jax.Array:
        """Terms [splits, ..., hidden] whose sum is the output map of the result of `mix`."""
        return self.output.terms(mixed, context)

    def inputs(self, x: jax.Array, mixed: jax.Array) -> dict[str, jax.Array]:
        """The input of each linear map, by its path; see `Mixer.inputs`."""
        return {"qkv": x, "output": mixed}

    def mix(
        self, x: Activations, context: StepContext, state: Any = None
    ) -> tuple[Activations, Any]:
        """Attends without the output map; returns [..., heads · head dim] and the state.

        x: [batch, tokens, hidden], or varlen [tokens, hidden]. With earlier tokens in the cache,
        the result is rounded to the output map's activation blocks, if that map has any and no
        permutation of its input channels. state: KVPages, or None without a cache; for a layer that
        reads another layer's keys and values, the other layer's next state, as in `_read`.
        """
        require_type("Attention: context", context, StepContext)
        x = as_activations("Attention: x", x)
        if self.is_reader:
            return self._read(x, context, state), state
        span = None
        if state is not None:
            span = context.span(self.group, has_blocks=state.format.block is not None)
        if context.kv_format is not None or (span is not None and not span.fresh):
            dtype = jnp.dtype(x.dtype)
            terms, gate = self._without_gate(self._normed_terms(x, context))
            if state is None or span is None:
                found: Any = own_pages.attend(self, terms, context, dtype)
            else:
                blocks = self._blocks if context.is_cached else None
                found, state = self.over_cache(terms, context, state, span, dtype, blocks)
            return gated(joined_heads(found), gate), state
        query, key, value, *own = self._projections(x, context)
        query, gate = (query, own[0]) if own else self._without_gate(query)
        attended, key, value = self.over_prompt((query, key, value), context)
        mixed = gated(joined_heads(attended), None if gate is None else gate[None])
        if state is None or span is None:
            return mixed, (key, value) if context.keeps else None
        return mixed, append(state, key, value, span)

    def _turned(self, context: StepContext) -> tuple[Masks, tuple[jax.Array, jax.Array]]:
        """The masks with the sinks, and cosines and sines [..., head dim / 2] of the tokens."""
        angles = as_array("Attention: angles", context.angles[self.rope])
        sinks = None if self.sinks is None else self.sinks.get_value()
        turn = rotary.turn(angles, self.rotary_dim, self.attention_factor)
        return dataclasses.replace(self.masks, sinks=sinks), turn

    def over_cache(
        self,
        terms: jax.Array,
        context: StepContext,
        state: KVPages,
        span: Span,
        dtype: jnp.dtype,
        blocks: ActivationBlocks | None = None,
    ) -> tuple[Any, KVPages]:
        """Attends through the pages; returns [..., heads, head dim] in `dtype`, and the pages.

        terms: [splits, ..., channels], whose sum is queries, keys and values, concatenated.
        blocks: to which the result is rounded, as by `paged_attention`.
        """
        # With norms after RoPE, `_scaled` multiplies queries that are not yet transformed.
        now, (masks, turn) = not self.norm_after, self._turned(context)
        rotation = Rotation(*turn, self.heads, self._norms(), now, self.keys_as_values)
        query, state = rotate_and_append(self._ordered(terms), state, span, rotation, dtype=dtype)
        query = self._scaled(query, context)
        return paged_attention(query, state, span, masks, transformed=now, blocks=blocks), state

    def over_prompt(
        self, parts: Sequence[jax.Array], context: StepContext
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Attends to whole sequences' keys and values as they are; differentiable.

        parts: queries, keys and values, [batch, tokens, channels of all heads] each. Returns the
        result, and keys and values for the cache, [batch, tokens, heads, head dim].
        """
        (masks, turn), dim = self._turned(context), self.head_dim
        query, key, value = (x.reshape(*x.shape[:2], x.shape[2] // dim, dim) for x in parts)
        query, key = self._ordered(query), self._ordered(key)
        if (norms := self._norms()) is not None:
            ones, dtype = jnp.ones_like(norms.key) if norms.values else None, query.dtype
            query, key, value = (
                each if weight is None else rms_norm(each, weight, norms.epsilon).astype(dtype)
                for each, weight in ((query, norms.query), (key, norms.key), (value, ones))
            )
        query, key = rotate(query, *turn), rotate(key, *turn)
        query = self._scaled(query, context)
        if self.bidirectional:
            if context.starts is not None:
                raise ValueError("tokens read those after them: such a model has no cache")
            return whole_attention(query, key, value, masks, context.counts), key, value
        return prefill_attention(query, key, value, masks), key, value

    def _read(self, x: Activations, context: StepContext, state: Any) -> Activations:
        """Attends to another layer's keys and values; the result is that of `mix`.

        state: the other layer's pages with these tokens, or without a cache its keys and values.
        """
        assert self.query_norm is not None
        masks, turn = self._turned(context)
        [query] = self.qkv(x, context)
        heads = self._ordered(query.reshape(*query.shape[:-1], *self.heads[:1], self.head_dim))
        weight = self._ordered(self.query_norm.weight.get_value())
        heads = rms_norm(heads, weight, self.query_norm.epsilon).astype(query.dtype)
        heads = rotary.rotate(heads, *turn)
        if not isinstance(state, KVPages):
            key, value = state
            return joined_heads(prefill_attention(heads, key, value, masks))
        span = context.span(self.group, has_blocks=state.format.block is not None)
        return joined_heads(paged_attention(heads, state, span, masks, blocks=self._blocks))

    @property
    def _blocks(self) -> ActivationBlocks | None:
        """The blocks to which attention rounds its outputs; None leaves that to the output map."""
        found = self.output.activations
        if self.output_gate or self.gate_map:  # the gate multiplies the unrounded outputs
            return None
        if isinstance(found, ActivationBlocks) and found.permutation is None:
            return found
        return None

    def _projections(self, x: Activations, context: StepContext) -> list[jax.Array]:
        """Queries, keys and values, [..., heads · head dim] each, after a joint norm, if any.

        With gate_map, the gates follow.
        """
        query, key, *own = self.qkv(x, context)
        value = key if self.keys_as_values else own.pop(0)
        if self.joint_norm:
            assert self.query_norm is not None
            assert self.key_norm is not None
            if self.joint_axis is None:
                return [self.query_norm(query), self.key_norm(key), value]
            means = means_of_squares((query, key), self.joint_channels, self.joint_axis)
            query = self.query_norm.scaled(query, means[0])
            key = self.key_norm.scaled(key, means[1])
        return [query, key, value, *own]

    def _normed_terms(self, x: Activations, context: StepContext) -> jax.Array:
        """Terms [splits, ..., channels of all heads] whose sum is `_projections`, concatenated."""
        if not self.joint_norm:
            return self.qkv.terms(x, context)
        return jnp.concatenate(self._projections(x, context), axis=-1)[None]

    def _without_gate(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Separates the gates from the outputs of the maps.

        x: [..., channels], the outputs of the query map first; with gate_map, all outputs.

        Returns x with the queries in their place, and the gates [..., heads · head dim]; x and None
        without gates.
        """
        heads, dim = self.heads[0], self.head_dim
        if self.gate_map:
            return x[..., : -heads * dim], x[..., -heads * dim :]
        if not self.output_gate:
            return x, None
        both = x[..., : 2 * heads * dim].reshape(*x.shape[:-1], heads, 2, dim)
        query, gate = (both[..., half, :].reshape(*x.shape[:-1], heads * dim) for half in (0, 1))
        return jnp.concatenate([query, x[..., 2 * heads * dim :]], -1), gate

    def _ordered(self, x: jax.Array) -> jax.Array:
        """Heads with RoPE's pairs of channels reordered to where the kernels expect them.

        x: query or key heads [..., head dim], or the concatenated channels [..., all] of all heads.
        """
        order = self.order
        if order is None:
            return x
        if x.shape[-1] != self.head_dim:
            queries, keys = self.heads
            turned = np.arange((queries + keys) * self.head_dim).reshape(-1, self.head_dim)
            rest = np.arange(turned.size, x.shape[-1])  # values
            order = (*turned[:, order].reshape(-1), *rest)
        return jnp.take(x, np.asarray(order), axis=-1)

    def _norms(self) -> HeadNorms | None:
        """QK-norm as the kernels apply it before RoPE, in the kernels' channel order; None without.

        For norms after RoPE, and without weights, the weights are ones here: RoPE doesn't change a
        head's length, so only the multiplication by weights has to wait (`_scaled`).
        """
        if self.plain_norm is not None:
            ones = jnp.ones(self.head_dim)
            return HeadNorms(ones, ones, self.plain_norm)
        if self.query_norm is None or self.key_norm is None or self.joint_norm:
            return None
        weights = self.query_norm.weight.get_value(), self.key_norm.weight.get_value()
        query, key = (self._ordered(weight) for weight in weights)
        if self.norm_after:
            query, key = jnp.ones_like(query), jnp.ones_like(key)
        return HeadNorms(query, key, self.query_norm.epsilon, self.value_norm)

    def _scaled(self, query: jax.Array, context: StepContext) -> jax.Array:
        """Rotated queries [..., heads, head dim] times the factors of their scores.

        The factors are the growth with positions and, with norms after RoPE, the weights of both
        norms: the query takes the key norm's weight too, since cached keys are stored without it.
        """
        rate, length, offset = self.growth
        if rate is None and not self.norm_after:
            return query
        found = query.astype(jnp.float32)
        if self.norm_after and self.query_norm is not None and self.key_norm is not None:
            for norm in (self.query_norm, self.key_norm):
                weight = self._ordered(norm.weight.get_value()).astype(jnp.float32)
                found *= jax.lax.broadcast_to_rank(weight, found.ndim)
        if rate is not None:
            positions = context.positions(query.shape[:-2])
            found *= (1 + rate * jnp.log1p((positions + offset) // length))[..., None, None]
        return found.astype(query.dtype)
