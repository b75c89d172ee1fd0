"""The norms of experts and of a shared expert that read the residual stream apart (Gemma 4)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.kernels import rms_norm
from mpjax.kernels.rowwise.projection import project
from mpjax.models.config import DecoderConfig
from mpjax.models.layers import Activations, Projected, RMSNorm, Rounding

NORMS = ("routed", "routed_post", "shared", "shared_post")


def shapes(hidden: int, experts: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of ExpertNorms, by path."""
    found: dict[str, tuple[int, ...]] = {f"{name}_norm.weight": (hidden,) for name in NORMS}
    return found | {"router_scale": (hidden,), "gain": (experts,)}


class ExpertNorms(nnx.Module):
    """Norms before and after the experts and the shared expert, and the router's own norm.

    router_scale: [hidden], of which hidden^−½ times is the weight of the router's norm. gain:
    [experts], factors of the routing weights.
    """

    def __init__(self, config: DecoderConfig, experts: int):
        hidden, dtype = config.hidden_size, config.dtype
        self.routed_norm, self.routed_post_norm = (RMSNorm.of(config, hidden) for _ in range(2))
        self.shared_norm, self.shared_post_norm = (RMSNorm.of(config, hidden) for _ in range(2))
        self.router_scale = nnx.Param(jnp.ones(hidden, dtype))
        self.gain = nnx.Param(jnp.ones(experts, dtype))
        self.epsilon = config.rms_norm_eps

    def routed_input(self, stream: jax.Array, router: jax.Array) -> Projected:
        """The input of experts, and the router's products of its own norm of the stream.

        stream: [..., hidden]. router: [experts, hidden].
        """
        scale = self.router_scale.get_value().astype(jnp.float32) * stream.shape[-1] ** -0.5
        normed = rms_norm(stream, scale, self.epsilon).astype(stream.dtype)
        return Projected(self.routed_norm(stream), project(normed, router))

    def shared_input(self, stream: jax.Array, format: Rounding | None) -> Activations:
        """The input of the shared expert, rounded to the format."""
        return self.shared_norm.add(stream[None], None, format)[1]

    def outputs(self, routed: jax.Array, shared: jax.Array) -> jax.Array:
        """Two terms [2, ..., hidden]: the norms of what experts and the shared expert add up to.

        routed, shared: their terms [terms, ..., hidden].
        """
        parts = ((self.routed_post_norm, routed), (self.shared_post_norm, shared))
        found: Any = [norm.add(terms, None, None)[1] for norm, terms in parts]
        return jnp.stack(found)
