"""Multi-head latent attention: one vector of each token serves as keys and values of all heads.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.kernels import (
    KVFormat,
    KVLayout,
    KVPages,
    Masks,
    QuantizedTensor,
    Span,
    append,
    latent_attention,
    latent_format,
    paged_attention,
    prefill_attention,
)
from mpjax.kernels.checks import as_dtype, require_type
from mpjax.kernels.cutting import Run
from mpjax.kernels.gradients import with_gradients_of
from mpjax.kernels.invariance import in_row_tiles, is_batch_invariant
from mpjax.kernels.kv_cache.api import HEAD_DIMS
from mpjax.kernels.kv_cache.cache import create_pages
from mpjax.kernels.kv_cache.reference import gather
from mpjax.models import own_pages, rotary
from mpjax.models.config import AttentionSpec, DecoderConfig
from mpjax.models.kv_state import KVState
from mpjax.models.layers import Activations, FusedLinear, Linear, RMSNorm, Rounding, as_activations
from mpjax.models.maps import Fold, LinearMaps
from mpjax.models.share import Cut, HeadShares, Share
from mpjax.models.state import Room, StepContext

# Latents of earlier tokens are expanded to keys and values for at least this number of new tokens,
# if the keys and values take no more than these bytes.
EXPANDED_TOKENS, EXPANDED_BYTES = 128, 2**30
Projections = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # see `_projections`
Maps = tuple[jax.Array, jax.Array]  # see `_maps`
EPSILON = 1e-6  # of both norms, whatever the epsilon of the model's other norms


@dataclasses.dataclass(frozen=True)
class LatentSpec(AttentionSpec):
    """Spec of multi-head latent attention.

    rank: the channels of a token's latent. rotary: the channels of a token's rotary part, which all
        heads share, and the number of rotated channels of each query.
    keys, values: the channels of each head that are not rotated, and of its values.
    query_rank: the channels between the two maps of queries, which have a norm; None for one map.
    bias: whether the maps of the input and the output map have biases.
    interleaved: whether files have interleaved RoPE.
    scale: of the scores; None for 1/√(keys + rotary).
    growth, growth_context: of queries with their positions, as in GroupedQuerySpec.
    """

    kind: ClassVar[str] = "latent"
    rank: int = 512
    rotary: int = 64
    keys: int = 128
    values: int = 128
    query_rank: int | None = None
    bias: bool = False
    interleaved: bool = True
    scale: float | None = None
    growth: float | None = None
    growth_context: int = 8192

    @property
    def first(self) -> str:
        """The path of the input's maps: to queries (or their low-rank form) and to latents."""
        return "joint" if self.query_rank is None else "down"

    @property
    def head_dim(self) -> int:
        """The number of channels of a query head."""
        return self.keys + self.rotary

    def why_unsound(self) -> str | None:
        """The reason why the fields don't fit together, or None if they do."""
        if self.window is not None:
            return "window is set: latents have no sliding window"
        if self.bias and self.query_rank is None:
            return "bias is true and query_rank None: no such attention is implemented"
        return None if self.rotary % 2 == 0 else f"rotary is {self.rotary}: expected an even number"

    def build(self, config: DecoderConfig, rngs: nnx.Rngs) -> LatentAttention:
        """A LatentAttention module with random weights."""
        return LatentAttention(config, self, rngs)

    def state(self, config: DecoderConfig) -> LatentState:
        """The latents of tokens and their rotary parts, in pages."""
        return LatentState(1, self.rank, config.dtype, None, self.rotary)

    def linear_maps(self, config: DecoderConfig) -> tuple[LinearMaps, ...]:
        """The maps of the input, the second map of queries, the map of latents, and the output map.

        `expand` maps latents to keys and values, one head after another. While decoding, its
        transpose multiplies queries, where scales of groups of its inputs can't be used: it stays
        in 16 bits.
        """
        hidden, heads = config.hidden_size, config.num_heads
        queries, latents = heads * self.head_dim, self.rank + self.rotary
        shapes = (hidden, self.query_rank or queries), (hidden, latents)
        maps = [LinearMaps(self.first, shapes, self.bias)]
        if self.query_rank is not None:
            maps.append(LinearMaps("query", ((self.query_rank, queries),)))
        both = heads * (self.keys + self.values)
        return (
            *maps,
            LinearMaps("expand", ((self.rank, both),), is_precise=True, is_plain=True),
            LinearMaps("output", ((heads * self.values, hidden),), self.bias),
        )

    def arrays(self, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights of the norms of latents, and of queries between their maps."""
        found: dict[str, tuple[int, ...]] = {"latent_norm.weight": (self.rank,)}
        if self.query_rank is not None:
            found["query_norm.weight"] = (self.query_rank,)
        return found

    def folds(self, config: DecoderConfig) -> tuple[Fold, ...]:
        """The fold of the norm of queries and their second map."""
        return () if self.query_rank is None else (Fold("query", "query_norm"),)

    def working_bytes(self, config: DecoderConfig, tokens: int) -> int:
        """Peak bytes of the tokens' queries, keys and values, and of those of cached latents.

        The latter are there twice: as the map gives them, and in pages.
        """
        of_token = 2 * config.num_heads * self.padded_dim
        of_token *= as_dtype("dtype", config.dtype).itemsize
        cached = tokens * config.max_position_embeddings if tokens >= EXPANDED_TOKENS else 0
        return 2 * tokens * of_token + 2 * min(cached * of_token, EXPANDED_BYTES)

    @property
    def padded_dim(self) -> int:
        """The number of channels to which the kernels' keys and values are padded in each head."""
        most = max(self.head_dim, self.values)
        return next((dim for dim in HEAD_DIMS if dim >= most), most)

    def divide(self, count: int, units: Mapping[str, int]) -> LatentSpec:
        """The same spec: the number of heads is in the configuration."""
        return self

    def cuts(self, config: DecoderConfig, local: LatentSpec, share: Share) -> dict[str, Cut]:
        """The heads of a share; all devices have the latents and the maps to them whole."""
        heads, _ = HeadShares(config.num_heads, config.num_kv_heads, share.count).runs(share.number)
        queries = heads.times(self.head_dim)
        found = {
            "expand": Cut(outputs=(heads.times(self.keys + self.values),)),
            "output": Cut(inputs=heads.times(self.values)),
        }
        inner, latents = queries, self.rank + self.rotary
        if self.query_rank is not None:
            found["query"] = Cut(outputs=(queries,))
            inner = Run(0, self.query_rank, self.query_rank)
        return found | {self.first: Cut(outputs=(inner, Run(0, latents, latents)))}


@dataclasses.dataclass(frozen=True)
class LatentState(KVState):
    """The state of latent attention: latents as keys, and their rotary parts as values.

    rotary: the channels of the rotary part; other fields are as in KVState.
    """

    rotary: int = 64

    def create(self, room: Room, scales: jax.Array | None) -> KVPages:
        """Empty pages. scales: unused.

        Raises ValueError for a format that is not supported for latents.
        """
        layout = KVLayout(
            *(1, self.head_dim, latent_format(room.format), room.page_size, self.dtype),
            value_dim=self.rotary,
        )
        [pages] = create_pages(layout, layers=1, pages=room.pages, sequences=room.sequences)
        return pages


class LatentAttention(nnx.Module):
    """Multi-head latent attention; see LatentSpec."""

    def __init__(self, config: DecoderConfig, spec: LatentSpec, rngs: nnx.Rngs):
        first, *query, expand, output = spec.linear_maps(config)
        setattr(self, spec.first, FusedLinear.create(first, config.dtype, rngs))
        self.query = nnx.data(None)
        self.query_norm = nnx.data(None)
        if spec.query_rank is not None:
            self.query = _linear(query[0], config, rngs)
            self.query_norm = RMSNorm(spec.query_rank, EPSILON, config.dtype)
        self.latent_norm = RMSNorm(spec.rank, EPSILON, config.dtype)
        self.expand, self.output = (_linear(maps, config, rngs) for maps in (expand, output))
        self.spec, self.heads = spec, config.num_heads
        self.group = config.page_groups.index(None)
        self.attention_factor = rotary.attention_factor(config, spec.rope)
        self.scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale

    @property
    def activations(self) -> Rounding:
        """How the input of the first maps is rounded."""
        return self.first.activations

    @property
    def first(self) -> FusedLinear:
        """The maps of the input."""
        found: FusedLinear = getattr(self, self.spec.first)
        return found

    def divide_norms(self, axis: str, heads: HeadShares) -> None:
        """Changes nothing: each device has all channels of the norms."""

    def terms(self, mixed: Activations, context: StepContext) -> jax.Array:
        """Terms [splits, ..., hidden] whose sum is the output map of the result of `mix`."""
        return self.output.terms(mixed, context)

    def inputs(self, x: jax.Array, mixed: jax.Array) -> dict[str, jax.Array]:
        """The input of each linear map, by its path; see `Mixer.inputs`."""
        first, second = self.first(x)
        found = {
            self.spec.first: x,
            "output": mixed,
            "expand": self.latent_norm(second[..., : self.rank]),
        }
        return found if self.query_norm is None else found | {"query": self.query_norm(first)}

    @property
    def rank(self) -> int:
        """The number of channels of a latent."""
        return self.spec.rank

    def mix(
        self, x: Activations, context: StepContext, state: KVPages | None = None
    ) -> tuple[jax.Array, KVPages | None]:
        """Attends without the output map; returns [..., heads · channels] and the state.

        x: [batch, tokens, hidden], or varlen [tokens, hidden]. Few new tokens attend to latents,
        with queries multiplied by the map from latents to keys; many attend to expanded keys and
        values. In deterministic mode all attend to latents, without a cache in pages for the call.
        """
        require_type("LatentAttention: context", context, StepContext)
        x = as_activations("LatentAttention: x", x)
        keys, rotated, latents, rotary_part = projections = self._projections(x, context)
        span, maps = None, self._maps(keys.dtype)
        if state is not None:
            span = context.span(self.group, has_blocks=False)
            state = append(state, latents[..., None, :], rotary_part[..., None, :], span)
        if is_batch_invariant() and (state is None or span is None):
            runs = self._whole, self._through_pages
            found = with_gradients_of(*runs, projections, maps, context)
        elif state is None or span is None or (span.fresh and not is_batch_invariant()):
            found = self._whole(projections, maps, context)
        elif self._is_expanded(x, span, state):
            query = jnp.concatenate([keys, rotated], -1)
            found = self._over_expanded(query, state, span, maps)
        else:
            found = self._absorbed(keys, rotated, state, span, maps)
        return found.reshape(*found.shape[:-2], self.heads * self.spec.values), state

    def _projections(self, x: Activations, context: StepContext) -> Projections:
        """Queries [..., heads, keys] and [..., heads, rotary], latents and rotary parts [..., ·].

        Rotary channels are rotated, with RoPE's pairs in the kernels' order.
        """
        spec = self.spec
        query, latents = self.first(x, context)
        if self.query is not None and self.query_norm is not None:
            query = self.query(self.query_norm(query), context)
        query = query.reshape(*query.shape[:-1], self.heads, spec.head_dim)
        keys, rotated = query[..., : spec.keys], query[..., spec.keys :]
        latents, part = latents[..., : spec.rank], latents[..., spec.rank :]
        pairs = spec.rotary // 2
        angles = context.angles[spec.rope][..., :pairs]
        turn = rotary.turn(angles, spec.rotary, self.attention_factor)
        order = rotary.channel_order(spec.rotary, spec.rotary, spec.interleaved)

        def turned(heads: jax.Array) -> jax.Array:
            heads = heads if order is None else jnp.take(heads, np.asarray(order), axis=-1)
            return rotary.rotate(heads, *turn)

        keys, rotated = self._grown(keys, context), self._grown(turned(rotated), context)
        return keys, rotated, self.latent_norm(latents), turned(part[..., None, :])[..., 0, :]

    def _grown(self, query: jax.Array, context: StepContext) -> jax.Array:
        """Queries [..., heads, channels] times their position-dependent scaling."""
        if (rate := self.spec.growth) is None:
            return query
        positions = context.positions(query.shape[:-2])
        growth = 1 + rate * jnp.log1p(positions // self.spec.growth_context)
        return (query.astype(jnp.float32) * growth[..., None, None]).astype(query.dtype)

    def _maps(self, dtype: jnp.dtype) -> Maps:
        """The maps from latents to keys and to values, [rank, heads, channels] each."""
        if self.expand.adapter is not None:
            raise ValueError(
                "an adapter changes the map from latents to keys and values (kv_b_proj), which is "
                "not supported: leave this map out of the adapter"
            )
        kernel: Any = self.expand.kernel.get_value()
        kernel = kernel.dequantize(dtype) if isinstance(kernel, QuantizedTensor) else kernel
        apart = kernel.astype(dtype).reshape(self.rank, self.heads, -1)
        return apart[..., : self.spec.keys], apart[..., self.spec.keys :]

    def _whole(self, projections: Projections, maps: Maps, context: StepContext) -> jax.Array:
        """Attention of whole sequences over expanded keys and values, [..., heads, values]."""
        keys, rotated, latents, part = projections
        key, value = self._expanded(latents, part, maps)
        query = _padded(jnp.concatenate([keys, rotated], -1), key.shape[-1])
        found = prefill_attention(query, key, value, Masks(self.scale))
        return found[..., : self.spec.values]

    def _through_pages(
        self, projections: Projections, maps: Maps, context: StepContext
    ) -> jax.Array:
        """The same over latents in pages for the call; see `own_pages`."""
        keys, rotated, latents, part = projections
        kept = LatentState(1, self.rank, latents.dtype.name, None, self.spec.rotary)
        pages, span = own_pages.empty(kept, context.kv_format, latents.shape[:2])
        pages = append(pages, latents[..., None, :], part[..., None, :], span)
        return self._absorbed(keys, rotated, pages, span, maps)

    def _absorbed(
        self, keys: jax.Array, rotated: jax.Array, state: KVPages, span: Span, maps: Maps
    ) -> jax.Array:
        """Attention over latents with absorbed queries, [..., heads, values]."""
        to_keys, to_values = maps
        query = _by_head("thk,rhk->thr", keys, to_keys)
        means = latent_attention(query, rotated, state, span, scale=self.scale)
        return _by_head("thr,rhv->thv", means, to_values)

    def _expanded(
        self, latents: jax.Array, part: jax.Array, maps: Maps
    ) -> tuple[jax.Array, jax.Array]:
        """Keys and values [batch, tokens, heads, ·] of latents, zero-padded to one size."""
        spec = self.spec
        keys, values = (_einsum("...r,rhc->...hc", latents, one) for one in maps)
        shape = *keys.shape[:-1], spec.rotary
        keys = jnp.concatenate([keys, jnp.broadcast_to(part[..., None, :], shape)], -1)
        return _padded(keys, spec.padded_dim), _padded(values, spec.padded_dim)

    def _is_expanded(self, x: Activations, span: Span, state: KVPages) -> bool:
        """Whether latents of the whole cache are expanded: for many tokens, if memory suffices."""
        if is_batch_invariant():
            return False
        channels = 2 * self.heads * self.spec.padded_dim * jnp.dtype(x.dtype).itemsize
        capacity = span.block_tables.size * state.page_size
        return x.shape[-2] >= EXPANDED_TOKENS and capacity * channels <= EXPANDED_BYTES

    def _over_expanded(self, query: jax.Array, state: KVPages, span: Span, maps: Maps) -> jax.Array:
        """Attention over keys and values of all cached latents, [..., heads, values]."""
        latents, parts = (x[:, :, 0].astype(query.dtype) for x in gather(state, span.block_tables))
        keys, values = self._expanded(latents, parts, maps)

        def paged(x: jax.Array) -> jax.Array:
            pages = x.reshape(-1, state.page_size, *x.shape[2:])
            return pages.swapaxes(1, 2)

        pages = KVPages(paged(keys), paged(values), None, None, KVFormat())
        tables = jnp.arange(span.block_tables.size, dtype=jnp.int32)
        places = dataclasses.replace(span, block_tables=tables.reshape(span.block_tables.shape))
        query = _padded(query, pages.head_dim)
        found = paged_attention(query, pages, places, Masks(self.scale))
        return found[..., : self.spec.values]


def _linear(maps: LinearMaps, config: DecoderConfig, rngs: nnx.Rngs) -> Linear:
    return Linear.create(maps.shapes[0], bias=maps.bias, dtype=config.dtype, rngs=rngs)


def _by_head(axes: str, x: jax.Array, maps: jax.Array) -> jax.Array:
    """Each head of x [..., heads, channels] times its own map: [..., heads, outputs].

    axes: the einsum, in which t is the axis of tokens. See `in_row_tiles` for batch invariance.
    """
    *places, heads, channels = x.shape

    def multiply(rows: jax.Array, maps: jax.Array) -> jax.Array:
        return _einsum(axes, rows.reshape(-1, heads, channels), maps).reshape(len(rows), -1)

    found = in_row_tiles(multiply, x.reshape(-1, heads * channels), maps)
    return found.reshape(*places, heads, -1)


def _einsum(axes: str, x: jax.Array, maps: jax.Array) -> jax.Array:
    """An einsum with float32 sums, in the dtype of x."""
    return jnp.einsum(axes, x, maps, preferred_element_type=jnp.float32).astype(x.dtype)


def _padded(x: jax.Array, channels: int) -> jax.Array:
    """Heads [..., channels] padded with zeros."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, channels - x.shape[-1])])
