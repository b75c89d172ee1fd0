"""The attention layer, with or without a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.kernels import (
    ActivationBlocks,
    HeadNorms,
    KVPages,
    Masks,
    QuantizedActivations,
    Rotation,
    append,
    paged_attention,
    prefill_attention,
    rms_norm,
    rotate,
    rotate_and_append,
)
from mpjax.kernels.checks import as_array, require_type
from mpjax.models import rotary
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
from mpjax.models.share import Cut, HeadShares, Share
from mpjax.models.state import StepContext


class Mixer(Protocol):
    """Interface that a DecoderLayer uses of the module that a MixerSpec builds.

    A mixer passes information between tokens. Only the mixer knows the contents of its state.
    """

    @property
    def activations(self) -> Rounding:
        """How the input of the first map is rounded."""

    def mix(self, x: Activations, context: StepContext, state: Any) -> tuple[Activations, Any]:
        """The mixer without its last linear map.

        x: [batch, tokens, hidden], or varlen [tokens, hidden]. state: of the earlier tokens, as
        created by the spec's `state`; None without a cache.

        Returns the input of the last map, [..., channels], and the state with these tokens.
        """

    def terms(self, mixed: Activations, context: StepContext) -> jax.Array:
        """Terms [splits, ..., hidden] whose sum is the output of the last map for `mixed`."""

    def inputs(self, x: jax.Array, mixed: Any) -> dict[str, jax.Array]:
        """The input of each linear map, by its path, from the arguments of `mix` and `terms`."""

    def divide_norms(self, axis: str, heads: HeadShares) -> None:
        """Makes joint norms cover the heads of all devices of a mesh axis."""


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

    def build(self, config: DecoderConfig, rngs: nnx.Rngs) -> Attention:
        """An Attention module with random weights."""
        return Attention(config, self, rngs)

    def state(self, config: DecoderConfig) -> KVState:
        """The keys and values of tokens, in pages."""
        return KVState(config.num_kv_heads, config.head_dim, config.dtype, self.window)

    def linear_maps(self, config: DecoderConfig) -> tuple[LinearMaps, ...]:
        """Two products: query, key and value together (`qkv`), and `output`."""
        hidden = config.hidden_size
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        asked = query * (1 + self.output_gate)
        sizes = asked, key, key, *[query] * self.gate_map
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
            found |= {"query_norm.weight": (query,), "key_norm.weight": (key,)}
        return found | ({"sinks": (config.num_heads,)} if self.sinks else {})

    def norm_sizes(self, config: DecoderConfig) -> tuple[int, int]:
        """The number of channels that one query norm, and one key norm, normalises."""
        dim = config.head_dim
        if self.joint_norm:
            return config.num_heads * dim, config.num_kv_heads * dim
        return dim, dim

    def why_unsound(self) -> str | None:
        """The reason why the fields don't fit together, or None if they do."""
        gated = self.output_gate or self.gate_map
        for are_set, names in (
            (self.output_gate and self.joint_norm, "output_gate and joint_norm are true"),
            (self.output_gate and self.gate_map, "output_gate and gate_map are true"),
            (self.joint_norm and (self.gate_map or not self.norm_weights), "joint_norm is true"),
            (self.gate_map and self.qkv_bias, "gate_map and qkv_bias are true"),
            (gated and bool(self.factors), "factors are set, and there is a gate"),
            (self.bidirectional and (self.sinks or self.chunked), "bidirectional is true"),
            (self.chunked and self.window is None, "chunked is true and window None"),
        ):
            if are_set:
                return f"{names}: no such attention is implemented"
        if len(self.factors) in (0, 3):
            return None
        return f"factors is {self.factors!r:.80}: expected three, of queries, keys and values"

    def folds(self, config: DecoderConfig) -> tuple[Fold, ...]:
        """The fold of values and output map: attention averages each value channel over tokens."""
        copies = config.num_heads // config.num_kv_heads
        heads = config.num_kv_heads, copies, config.head_dim
        return (
            Fold("output", "qkv", 2, heads, is_mixable=not (self.output_gate or self.gate_map)),
        )

    def divide(self, count: int, units: Mapping[str, int]) -> GroupedQuerySpec:
        """The same spec: the numbers of heads are in the configuration."""
        return self

    def cuts(self, config: DecoderConfig, local: GroupedQuerySpec, share: Share) -> dict[str, Cut]:
        """The outputs and sinks of a share's heads, and the matching inputs of the output map.

        A joint norm is cut to the weights of the share's heads.
        """
        heads = HeadShares(config.num_heads, config.num_kv_heads, share.count)
        own = heads.runs(share.number)
        query, key = (run.times(config.head_dim) for run in own)
        asked = query.times(1 + self.output_gate)
        outputs = asked, key, key, *[query] * self.gate_map
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
        self.key_norm = RMSNorm.of(config, key) if has_weights else None
        self.plain_norm = config.rms_norm_eps if spec.qk_norm and not has_weights else None
        self.joint_norm = spec.qk_norm and spec.joint_norm
        self.output_gate, self.gate_map = spec.output_gate, spec.gate_map
        self.joint_axis: str | None = None  # mesh axis that divides the heads
        self.joint_channels = query, key  # that a joint norm covers, on all devices
        self.heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        self.masks = Masks(spec.scale, spec.window, spec.softcap, chunked=spec.chunked)
        self.rope, self.group = spec.rope, config.page_groups.index(spec.window)
        self.rotary_dim = config.rotary_dim or config.head_dim
        # A norm after RoPE removes any factor of queries and keys.
        factor = rotary.attention_factor(config, spec.rope)
        self.attention_factor = 1.0 if spec.qk_norm and spec.norm_after else factor
        self.norm_after = has_weights and spec.norm_after  # RoPE keeps lengths, but not weights
        self.growth = spec.growth, spec.growth_context, int(spec.growth_from_one)
        self.bidirectional = spec.bidirectional
        order = rotary.channel_order(self.rotary_dim, self.head_dim, spec.interleaved)
        self.order = None if order is None else tuple(order.tolist())  # arrays are not hashable
        zeros = jnp.zeros(config.num_heads, config.dtype) if spec.sinks else None
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
        self, x: Activations, context: StepContext, state: KVPages | None = None
    ) -> tuple[Activations, KVPages | None]:
        """Attends without the output map; returns [..., heads · head dim] and the state.

        x: [batch, tokens, hidden], or varlen [tokens, hidden]. With earlier tokens in the cache,
        the result is rounded to the output map's activation blocks, if that map has any and no
        permutation of its input channels.
        """
        require_type("Attention: context", context, StepContext)
        x = as_activations("Attention: x", x)
        angles = as_array("Attention: angles", context.angles[self.rope])
        sinks = None if self.sinks is None else self.sinks.get_value()
        masks = dataclasses.replace(self.masks, sinks=sinks)
        turn = rotary.turn(angles, self.rotary_dim, self.attention_factor)
        span = None
        if state is not None:
            span = context.span(self.group, has_blocks=state.format.block is not None)
        if state is not None and span is not None and not span.fresh:
            terms, gate = self._without_gate(self._normed_terms(x, context))
            terms = self._ordered(terms)
            # With norms after RoPE, `_scaled` multiplies queries that are not yet transformed.
            now = not self.norm_after
            rotation = Rotation(*turn, self.heads, self._norms(), transform_queries=now)
            query, state = rotate_and_append(terms, state, span, rotation, dtype=x.dtype)
            query = self._scaled(query, context)
            found = paged_attention(query, state, span, masks, transformed=now, blocks=self._blocks)
            return _gated(_joined_heads(found), gate), state
        batch, tokens, _ = x.shape
        query, key, value, *own = self._projections(x, context)
        query, gate = (query, own[0]) if own else self._without_gate(query)
        query, key, value = (
            part.reshape(batch, tokens, part.shape[-1] // self.head_dim, self.head_dim)
            for part in (query, key, value)
        )  # [batch, tokens, heads, head dim]
        query, key = self._ordered(query), self._ordered(key)
        if (norms := self._norms()) is not None:
            query, key = (
                rms_norm(each, weight, norms.epsilon).astype(each.dtype)
                for each, weight in ((query, norms.query), (key, norms.key))
            )
        query, key = rotate(query, *turn), rotate(key, *turn)
        query = self._scaled(query, context)
        if state is not None and span is not None:
            state = append(state, key, value, span)
        if self.bidirectional:
            if state is not None:
                raise ValueError("tokens read those after them: such a model has no cache")
            attended = whole_attention(query, key, value, masks, context.counts)
        else:
            attended = prefill_attention(query, key, value, masks)
        mixed = attended.reshape(batch, tokens, self.heads[0] * self.head_dim)
        return _gated(mixed, None if gate is None else gate[None]), state

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
        query, key, value, *own = self.qkv(x, context)
        if self.joint_norm:
            assert self.query_norm is not None
            assert self.key_norm is not None
            if self.joint_axis is None:
                return [self.query_norm(query), self.key_norm(key), value]
            means = _means_of_squares((query, key), self.joint_channels, self.joint_axis)
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
        return HeadNorms(query, key, self.query_norm.epsilon)

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


def _means_of_squares(
    parts: tuple[jax.Array, ...], channels: tuple[int, ...], axis: str
) -> list[jax.Array]:
    """The mean squares, float32 [..., 1], of arrays whose channels are divided among devices.

    parts: [..., this device's channels]. channels: the number of channels on all devices.
    """
    sums = [jnp.sum(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) for x in parts]
    return [total / count for total, count in zip(jax.lax.psum(sums, axis), channels, strict=True)]


def _gated(x: Activations, gate: jax.Array | None) -> Activations:
    """Outputs [..., channels] times the sigmoid of the sum of a gate's terms [splits, ...]."""
    if gate is None:
        return x
    assert isinstance(x, jax.Array)
    factor = jax.nn.sigmoid(gate.astype(jnp.float32).sum(0))
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def _joined_heads(x: Activations) -> Activations:
    """Concatenates heads [..., heads, head dim]; quantised outputs are concatenated already."""
    if isinstance(x, QuantizedActivations):
        return x
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])
