"""A layer of a decoder: attention and MLP with their norms, and the residual stream."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.kernels import ActivationFormat, KVPages, Span, quantize_rows
from mpjax.kernels.optimized_once import optimized_once
from mpjax.kernels.plans import conditions as plan_conditions
from mpjax.models.attention import AttentionModule
from mpjax.models.config import DecoderConfig, LayerSpec
from mpjax.models.layers import Projection, RMSNorm, Rounding
from mpjax.models.mlp import MLP, Inputs
from mpjax.models.riders import RidersSpan


class DecoderLayer(nnx.Module):
    """Attention and MLP, each added to the residual stream, with norms before or after them."""

    def __init__(self, config: DecoderConfig, spec: LayerSpec, rngs: nnx.Rngs):
        norm = functools.partial(RMSNorm.of, config, config.hidden_size)
        pre, post = spec.has_pre_norms, spec.has_post_norms
        self.attention_norm = norm() if pre else None
        self.attention = spec.attention.build(config, rngs)
        self.mlp_norm = norm() if pre else None
        self.mlp = spec.mlp.build(config, rngs)
        self.attention_post_norm = norm() if post else None
        self.mlp_post_norm = norm() if post else None
        self.rope = spec.attention.rope

    def __call__(
        self,
        terms: jax.Array,
        residual: jax.Array | None,
        angles: jax.Array,
        pages: KVPages | None,
        span: Span | RidersSpan | None,
    ) -> tuple[jax.Array, jax.Array, KVPages | None]:
        """Runs the layer; returns the next terms, the next residual stream, and the pages.

        terms: [splits, batch, tokens, hidden], partial sums of the previous layer's output, which
        the norm adds to the residual stream as it reads it: one pass over the stream instead of
        two. residual: [batch, tokens, hidden], or None before the first layer.
        angles, pages, span: as for `Attention.attend`. With a cache no gradient is wanted, so norms
        also round activations to the 8-bit format that the next weight asks for.
        """
        cached = span is not None
        attention: AttentionModule = self.attention
        format = attention.activations if cached else None
        residual, x = _read(self.attention_norm, terms, residual, format)
        attended, pages = attention.attend(x, angles, pages, span)
        terms, residual = _after_attention(
            plan_conditions(), self, attended, residual, cached=cached
        )
        return terms, residual, pages

    def inputs(self, hidden: jax.Array, angles: jax.Array) -> tuple[jax.Array, Inputs]:
        """The next residual stream, and the input of each linear map, by its path.

        hidden: the residual stream [batch, tokens, hidden], of whole sequences from position 0.
        angles: float32 [batch, tokens, head dim / 2], of the rotary embedding.
        """
        attention: AttentionModule = self.attention
        mlp: MLP = self.mlp
        x = hidden if self.attention_norm is None else self.attention_norm(hidden)
        attended, _ = attention.attend(x, angles, None, None)
        assert isinstance(attended, jax.Array)  # outputs are rounded beside a cache alone
        found: Inputs = {
            f"attention.{path}": read for path, read in attention.inputs(x, attended).items()
        }
        terms = _written(self.attention_post_norm, attention.terms(attended))
        hidden = hidden + terms.sum(0).astype(hidden.dtype)
        x = hidden if self.mlp_norm is None else self.mlp_norm(hidden)
        found |= {f"mlp.{path}": read for path, read in mlp.inputs(x).items()}
        terms = _written(self.mlp_post_norm, mlp.terms(x, quantized=False))
        return hidden + terms.sum(0).astype(hidden.dtype), found


def _read(
    norm: RMSNorm | None,
    terms: jax.Array,
    residual: jax.Array | None,
    format: Rounding | Projection | None,
) -> tuple[jax.Array, Any]:
    """Adds terms to the residual stream; returns the stream, and what the next map reads of it."""
    if norm is not None:
        if isinstance(format, Projection):
            return norm.project(terms, residual, format)
        return norm.add(terms, residual, format)
    wide = terms.astype(jnp.float32).sum(0)
    if residual is not None:
        wide += residual.astype(jnp.float32)
        terms = residual  # whose dtype the stream has
    stream = wide.astype(terms.dtype)
    if format is None or isinstance(format, Projection):
        return stream, stream
    if isinstance(format, ActivationFormat) and not format.scales_rows:
        return stream, stream
    return stream, quantize_rows(stream, format)


def _written(norm: RMSNorm | None, terms: jax.Array) -> jax.Array:
    """The terms that a half adds to the residual stream: its output after a norm, if it has one."""
    if norm is None:
        return terms
    _, normed = norm.add(terms, None, None)
    assert isinstance(normed, jax.Array)
    return normed[None]


@optimized_once("plans", "cached")
def _after_attention(
    plans: Hashable, layer: DecoderLayer, attended: Any, residual: jax.Array, *, cached: bool
) -> tuple[jax.Array, jax.Array]:
    """The part of a layer behind attention: the next terms and residual stream.

    plans: the conditions that plans depend on. The others are as in the layer's call.
    """
    attention: AttentionModule = layer.attention
    mlp: MLP = layer.mlp
    terms = _written(layer.attention_post_norm, attention.terms(attended))
    reading = mlp.activations if cached else None
    residual, x = _read(layer.mlp_norm, terms, residual, reading)
    return _written(layer.mlp_post_norm, mlp.terms(x, quantized=cached)), residual
