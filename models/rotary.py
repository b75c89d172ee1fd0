"""The rotary embedding: frequencies with every kind of scaling, and partial RoPE.

The formula is RoFormer's. Pairs of channels that are not rotated have frequency 0, so that all
kernels rotate whole heads.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels import rotate as rotate_padded
from mpjax.models.config import DecoderConfig, RopeScaling
from mpjax.models.config_checks import ROPE_SCALINGS


def frequencies(
    config: DecoderConfig, rope: str = "global", lengths: jax.Array | int = 0
) -> jax.Array:
    """Radians per position of each pair of a head's channels, float32 [..., head dim / 2].

    rope: the kind of a layer's rotary embedding, as in `AttentionSpec.rope`. lengths: the rotary
    lengths of tokens, int [...]; unused without `scaling_by_length`.
    """
    if rope == "none":
        return jnp.zeros(config.head_dim_of(rope) // 2, jnp.float32)
    head_dim = config.head_dim_of(rope)
    rotated = config.rotary_dim or head_dim
    theta, scaling = config.rope_theta, config.rope_scaling
    if rope == "local":
        theta, scaling = config.local_rope_theta or theta, config.local_rope_scaling
    if rope == "draft":
        (theta, scaling), rotated = _of_draft(config), head_dim
    if config.scaling_by_length is None:
        lengths = 0
    found = scaled_frequencies(rotated, theta, scaling, lengths)
    rest = (head_dim - rotated) // 2
    return jnp.pad(found, [(0, 0)] * (found.ndim - 1) + [(0, rest)]) if rest else found


def _of_draft(config: DecoderConfig) -> tuple[float, RopeScaling | None]:
    """The theta and scaling of the layer that drafts."""
    spec: Any = config.layers[-1].attention
    return spec.attention.theta, spec.attention.scaling


def scaled_frequencies(
    dim: int, theta: float, scaling: RopeScaling | None, lengths: jax.Array | int = 0
) -> jax.Array:
    """Radians per position of each pair of `dim` channels, float32 [dim / 2].

    With `longrope` and `dynamic`: float32 [..., dim / 2] for rotary lengths int [...].
    """
    plain = theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "proportional":
        turning = int(scaling.rotated_share * dim // 2)
        return jnp.where(jnp.arange(dim // 2) < turning, plain / scaling.factor, 0.0)
    if scaling.kind == "llama3":
        return _llama3(plain, scaling)
    if scaling.kind == "yarn":
        return _yarn(plain, theta, scaling)
    if scaling.kind == "longrope":
        is_long = jnp.asarray(lengths)[..., None] > scaling.original_context
        short, long = (
            jax.lax.broadcast_to_rank(plain / jnp.asarray(factors, jnp.float32), is_long.ndim)
            for factors in (scaling.short_factors, scaling.long_factors)
        )
        return jnp.where(is_long, long, short)
    if scaling.kind != "dynamic":
        raise ValueError(f"RopeScaling: kind is {scaling.kind!r}: expected one of {ROPE_SCALINGS}")
    stretch = jnp.maximum(lengths, scaling.original_context) / scaling.original_context
    grown = theta * (scaling.factor * stretch - (scaling.factor - 1)) ** (dim / (dim - 2))
    exponents = -jnp.arange(0, dim, 2, dtype=jnp.float32) / dim
    grown = jnp.asarray(grown, jnp.float32)[..., None]
    return grown ** jax.lax.broadcast_to_rank(exponents, grown.ndim)


def _llama3(plain: jax.Array, scaling: RopeScaling) -> jax.Array:
    # Weight of the original frequency: 1 above the high-frequency bound, 0 below the low one. In
    # Llama 4 Scout both are equal, and nothing is between them.
    turns = scaling.original_context * plain / (2 * jnp.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    above = (turns > high).astype(jnp.float32)
    share = above if low == high else jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return plain * (share + (1 - share) / scaling.factor)


def _yarn(plain: jax.Array, theta: float, scaling: RopeScaling) -> jax.Array:
    """Frequencies float32 [pairs]: high ones as in `plain`, low ones divided by the factor.

    YaRN (arXiv 2309.00071, section 3.2).

    plain: the frequencies before scaling. Between the pairs that turn `fast_turns` and `slow_turns`
    times within the original context, the result is blended linearly.
    """
    dim = 2 * len(plain)

    def channel(turns: float) -> float:
        """The index, a fraction, of the pair that turns `turns` times in the original context."""
        wavelength = scaling.original_context / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(theta))

    first, last = channel(scaling.fast_turns), channel(scaling.slow_turns)
    if scaling.whole_channels:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    ramp = (jnp.arange(dim // 2, dtype=jnp.float32) - first) / max(last - first, 0.001)
    divided = jnp.clip(ramp, 0.0, 1.0)
    return plain * (1 - divided) + plain / scaling.factor * divided


def attention_factor(config: DecoderConfig, rope: str) -> float:
    """The factor of rotated queries and keys in layers with this kind of rotary embedding."""
    scaling = {"global": config.rope_scaling, "local": config.local_rope_scaling}.get(rope)
    scaling = _of_draft(config)[1] if rope == "draft" else scaling
    return 1.0 if scaling is None else scaling.attention_factor


def yarn_attention_factor(factor: float, share: float = 1.0) -> float:
    """YaRN's factor of queries and keys for a context that is `factor` times as long.

    share: the weight of its growth with the logarithm of `factor` (`mscale`).
    """
    return 0.1 * share * math.log(factor) + 1 if factor > 1 else 1.0


def turn(angles: jax.Array, rotated: int, factor: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of angles [..., head dim / 2], times a factor.

    rotated: the number of rotated channels of a head; the factor doesn't apply to the others.
    """
    cosines, sines = jnp.cos(angles), jnp.sin(angles)
    if factor == 1:
        return cosines, sines
    factors = np.ones(angles.shape[-1], np.float32)
    factors[: rotated // 2] = factor
    each = jax.lax.broadcast_to_rank(jnp.asarray(factors), angles.ndim)
    return cosines * each, sines * each


def rotate(x: jax.Array, cosines: jax.Array, sines: jax.Array) -> jax.Array:
    """RoPE of x [batch, tokens, heads, channels], or varlen [tokens, heads, channels].

    cosines, sines: [..., channels / 2], as `turn` returns them.
    """
    if x.ndim == 4:
        return rotate_padded(x, cosines, sines)
    return rotate_padded(x[None], cosines[None], sines[None])[0]


def channel_order(rotated: int, whole: int, interleaved: bool = False) -> np.ndarray | None:
    """An order of a head's channels in which RoPE's pairs are half a head apart; None: unchanged.

    rotated: the number of rotated channels. Hugging Face's models pair their two halves, or
    neighbours if interleaved; kernels pair the halves of a whole head. whole: the number of
    channels of a head. Scores don't change if queries and keys have the same order.
    """
    if rotated == whole and not interleaved:
        return None
    first, rest = np.arange(rotated), np.arange(rotated, whole).reshape(2, -1)
    turned = first.reshape(-1, 2).T if interleaved else first.reshape(2, -1)
    return np.concatenate([turned, rest], axis=1).reshape(-1)
