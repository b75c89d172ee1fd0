"""The attention layer, with or without a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Protocol

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
    Span,
    append,
    paged_attention,
    prefill_attention,
    rotate,
    rotate_and_append,
)
from mpjax.kernels.checks import as_array
from mpjax.models import rotary
from mpjax.models.config import AttentionSpec, DecoderConfig, Fold, LinearMaps
from mpjax.models.layers import (
    Activations,
    FusedLinear,
    Linear,
    RMSNorm,
    Rounding,
    as_activations,
)
from mpjax.models.riders import RidersSpan
from mpjax.models.share import Cut, HeadShares, Share


class AttentionModule(Protocol):
    """Interface that a DecoderLayer uses of the module that an AttentionSpec builds."""

    @property
    def activations(self) -> Rounding:
        """How the input of the first map is rounded."""

    def attend(
        self,
        x: Activations,
        angles: jax.Array,
        pages: KVPages | None,
        span: Span | RidersSpan | None,
    ) -> tuple[Activations, KVPages | None]:
        """Everything but the last map; see `Attention.attend`."""

    def terms(self, attended: Activations) -> jax.Array:
        """Terms [splits, ..., hidden] whose sum is the last map's output for what `attend` gave."""

    def inputs(self, x: jax.Array, attended: jax.Array) -> dict[str, jax.Array]:
        """The input of each linear map, by its path, from the arguments of `attend` and `terms`."""

    def divide_norms(self, axis: str, heads: HeadShares) -> None:
        """Makes joint norms cover the heads of all devices of a mesh axis."""


@dataclasses.dataclass(frozen=True)
class GroupedQuerySpec(AttentionSpec):
    """Grouped-query attention with rotary positions.

    qkv_bias: whether the query, key and value maps have biases. output_bias: whether the output
    map has one. qk_norm: whether an RMSNorm maps each query and key head before its rotation.
    joint_norm: whether that norm is one over the channels of all heads (OLMo 2).
    scale, softcap: of the scores; see Masks.
    sinks: whether each query head has a learned score without a value in its softmax (gpt-oss).
    """

    kind: ClassVar[str] = "grouped_query"
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    joint_norm: bool = False
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False

    def build(self, config: DecoderConfig, rngs: nnx.Rngs) -> Attention:
        """An Attention module with random weights."""
        return Attention(config, self, rngs)

    def linear_maps(self, config: DecoderConfig) -> tuple[LinearMaps, ...]:
        """Two products: query, key and value together (`qkv`), and `output`."""
        hidden = config.hidden_size
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return (
            LinearMaps("qkv", ((hidden, query), (hidden, key), (hidden, key)), self.qkv_bias),
            LinearMaps("output", ((query, hidden),), self.output_bias),
        )

    def arrays(self, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
        """Shapes of the query and key norms' weights, and of the sinks, by path."""
        found: dict[str, tuple[int, ...]] = {}
        if self.qk_norm:
            query, key = self.norm_sizes(config)
            found |= {"query_norm.weight": (query,), "key_norm.weight": (key,)}
        return found | ({"sinks": (config.num_heads,)} if self.sinks else {})

    def norm_sizes(self, config: DecoderConfig) -> tuple[int, int]:
        """The channels that the query norm and the key norm take together."""
        dim = config.head_dim
        if self.joint_norm:
            return config.num_heads * dim, config.num_kv_heads * dim
        return dim, dim

    def folds(self, config: DecoderConfig) -> tuple[Fold, ...]:
        """From the values to the output map: attention takes weighted means of each channel."""
        copies = config.num_heads // config.num_kv_heads
        heads = config.num_kv_heads, copies, config.head_dim
        return (Fold("output", "qkv", 2, heads, is_mixable=True),)

    def divide(self, count: int, units: Mapping[str, int]) -> GroupedQuerySpec:
        """The same spec: the configuration has the number of heads."""
        return self

    def cuts(self, config: DecoderConfig, local: GroupedQuerySpec, share: Share) -> dict[str, Cut]:
        """The outputs of a share's heads, their sinks, and as many inputs of the output map.

        Of a joint norm, a share has the weights of its heads.
        """
        heads = HeadShares(config.num_heads, config.num_kv_heads, share.count)
        own = heads.runs(share.number)
        query, key = (run.times(config.head_dim) for run in own)
        found = {"qkv": Cut(outputs=(query, key, key)), "output": Cut(inputs=query)}
        if self.qk_norm and self.joint_norm:
            found["query_norm.weight"] = Cut(outputs=(query,))
            found["key_norm.weight"] = Cut(outputs=(key,))
        return found | ({"sinks": Cut(outputs=own[:1])} if self.sinks else {})


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions; optional biases and query/key norms."""

    def __init__(self, config: DecoderConfig, spec: GroupedQuerySpec, rngs: nnx.Rngs):
        qkv, output = spec.linear_maps(config)
        self.qkv = FusedLinear.create(qkv, config.dtype, rngs)
        self.output = Linear.create(
            output.shapes[0], bias=output.bias, dtype=config.dtype, rngs=rngs
        )
        query, key = spec.norm_sizes(config)
        self.query_norm = RMSNorm.of(config, query) if spec.qk_norm else None
        self.key_norm = RMSNorm.of(config, key) if spec.qk_norm else None
        self.joint_norm = spec.qk_norm and spec.joint_norm
        self.joint_axis: str | None = None  # of devices that have some heads each
        self.joint_channels = query, key  # of all devices
        self.heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        self.masks = spec.scale, spec.window, spec.softcap
        self.rotary_dim = config.rotary_dim or config.head_dim
        self.attention_factor = rotary.attention_factor(config, spec.rope)
        zeros = jnp.zeros(config.num_heads, config.dtype) if spec.sinks else None
        self.sinks = nnx.data(None if zeros is None else nnx.Param(zeros))

    def __call__(
        self,
        x: Activations,
        angles: jax.Array,
        pages: KVPages | None,
        span: Span | RidersSpan | None,
    ) -> tuple[jax.Array, KVPages | None]:
        """Attention and its output map: x [batch, tokens, hidden] to the same shape, and the pages.

        The arguments are those of `attend`.
        """
        attended, pages = self.attend(x, angles, pages, span)
        return self.output(attended), pages

    def divide_norms(self, axis: str, heads: HeadShares) -> None:
        """Makes joint norms cover the heads of all devices of a mesh axis.

        A key head counts as often as there are devices with a copy of it.
        """
        self.joint_axis = axis
        keys = heads.kv_heads * heads.holders
        self.joint_channels = heads.heads * self.head_dim, keys * self.head_dim

    @property
    def activations(self) -> Rounding:
        """How the input of the query, key and value maps is rounded."""
        return self.qkv.activations

    def terms(self, attended: Activations) -> jax.Array:
        """Terms [splits, ..., hidden] whose sum is the output map of what `attend` returns."""
        return self.output.terms(attended)

    def inputs(self, x: jax.Array, attended: jax.Array) -> dict[str, jax.Array]:
        """The input of each linear map, by its path; see `AttentionModule.inputs`."""
        return {"qkv": x, "output": attended}

    def attend(
        self,
        x: Activations,
        angles: jax.Array,
        pages: KVPages | None,
        span: Span | RidersSpan | None,
    ) -> tuple[Activations, KVPages | None]:
        """Attends without the output map; returns [batch, tokens, heads · head dim] and the pages.

        x: [batch, tokens, hidden]. angles: rotary angles, float32 [batch, tokens, head dim / 2].
        With a cache, both may be varlen, [tokens, …], and then so is the result.
        pages and span come together: this layer's part of the cache, and where the new tokens lie
        in it; the returned pages hold the new keys and values. Without them x holds whole sequences
        from position 0. Where earlier tokens are in the cache, what is returned is rounded to the
        output map's blocks, if it has any and reads channels in the order of heads.
        """
        x, angles = as_activations("Attention: x", x), as_array("Attention: angles", angles)
        sinks = None if self.sinks is None else self.sinks.get_value()
        masks = Masks(*self.masks, sinks)
        if pages is not None and span is not None and not span.fresh:
            terms = self._ordered(self._normed_terms(x))
            turn = rotary.turn(angles, self.rotary_dim, self.attention_factor)
            rotation = Rotation(*turn, self.heads, self._norms(), transform_queries=True)
            new = terms, rotation
            return _attend_cached(new, pages, span, masks, self._blocks, x.dtype)
        batch, tokens, _ = x.shape
        query, key, value = (
            part.reshape(batch, tokens, part.shape[-1] // self.head_dim, self.head_dim)
            for part in self._projections(x)
        )  # [batch, tokens, heads, head dim]
        if self.query_norm is not None and self.key_norm is not None and not self.joint_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        turn = rotary.turn(angles, self.rotary_dim, self.attention_factor)
        query, key = (rotate(self._ordered(each), *turn) for each in (query, key))
        if pages is not None and isinstance(span, Span):
            pages = append(pages, key, value, span)
        attended = prefill_attention(query, key, value, masks)
        return attended.reshape(batch, tokens, self.heads[0] * self.head_dim), pages

    @property
    def _blocks(self) -> ActivationBlocks | None:
        """The blocks to which attention rounds its outputs; None leaves that to the output map."""
        found = self.output.activations
        if isinstance(found, ActivationBlocks) and found.permutation is None:
            return found
        return None

    def _projections(self, x: Activations) -> list[jax.Array]:
        """Queries, keys and values, [..., heads · head dim] each, after a joint norm."""
        query, key, value = self.qkv(x)
        if self.joint_norm:
            assert self.query_norm is not None
            assert self.key_norm is not None
            if self.joint_axis is None:
                return [self.query_norm(query), self.key_norm(key), value]
            means = _means_of_squares((query, key), self.joint_channels, self.joint_axis)
            query = self.query_norm.scaled(query, means[0])
            key = self.key_norm.scaled(key, means[1])
        return [query, key, value]

    def _normed_terms(self, x: Activations) -> jax.Array:
        """Terms [splits, ..., channels of all heads], whose sum is what `_projections` gives."""
        if not self.joint_norm:
            return self.qkv.terms(x)
        return jnp.concatenate(self._projections(x), axis=-1)[None]

    def _ordered(self, x: jax.Array) -> jax.Array:
        """Heads with their channels in the order of the kernels' pairs.

        x: query or key heads [..., head dim], or the channels [..., all] of all heads.
        """
        order = rotary.channel_order(self.rotary_dim, self.head_dim)
        if order is None:
            return x
        if x.shape[-1] != self.head_dim:
            queries, keys = self.heads
            turned = np.arange((queries + keys) * self.head_dim).reshape(-1, self.head_dim)
            rest = np.arange(turned.size, x.shape[-1])  # values
            order = np.concatenate([turned[:, order].reshape(-1), rest])
        return jnp.take(x, jnp.asarray(order), axis=-1)

    def _norms(self) -> HeadNorms | None:
        if self.query_norm is None or self.key_norm is None or self.joint_norm:
            return None
        weights = self.query_norm.weight.get_value(), self.key_norm.weight.get_value()
        query, key = (self._ordered(weight) for weight in weights)
        return HeadNorms(query, key, self.query_norm.epsilon)


def _means_of_squares(
    parts: tuple[jax.Array, ...], channels: tuple[int, ...], axis: str
) -> list[jax.Array]:
    """The means float32 [..., 1] of the squares of arrays of which each device has a part.

    parts: [..., own channels]. channels: those of all devices.
    """
    sums = [jnp.sum(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) for x in parts]
    return [total / count for total, count in zip(jax.lax.psum(sums, axis), channels, strict=True)]


def _attend_cached(
    new: tuple[jax.Array, Rotation],
    pages: KVPages,
    span: Span | RidersSpan,
    masks: Masks,
    blocks: ActivationBlocks | None,
    dtype: jax.typing.DTypeLike,
) -> tuple[Activations, KVPages]:
    """Appends new tokens to the pages, and attends from them, in each part of the span apart.

    new: terms of queries, keys and values, and the tokens' rotation, as for `rotate_and_append`.
    blocks: to which the result is rounded, where the span has one part.

    Returns [..., heads · head dim] and the pages.
    """
    terms, rotation = new
    if isinstance(span, Span):
        query, pages = rotate_and_append(terms, pages, span, rotation, dtype=dtype)
        found = paged_attention(query, pages, span, masks, transformed=True, blocks=blocks)
        return _joined_heads(found), pages
    # All parts are appended before any is read, so that the pages are written in place.
    queries, parts = [], span.parts(terms.shape[1])
    for part in parts:
        turn = rotation.map_angles(part.of)
        query, pages = rotate_and_append(
            part.of(terms, leading=1), pages, part.span, turn, dtype=dtype
        )
        queries.append(query)
    attended = [
        paged_attention(query, pages, part.span, masks, transformed=True)
        for query, part in zip(queries, parts, strict=True)
    ]
    prompts, rows = attended
    return _joined_heads(jnp.concatenate([prompts, rows[:, 0]])), pages


def _joined_heads(x: Activations) -> Activations:
    """Outputs of heads [..., heads, head dim] side by side; rounded ones are already."""
    if isinstance(x, QuantizedActivations):
        return x
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])
