"""YaRN's scaling of the rotary embedding (arXiv 2309.00071, section 3.2)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from mpjax.models.config import RopeScaling


def yarn(plain: jax.Array, theta: float, scaling: RopeScaling) -> jax.Array:
    """Frequencies float32 [pairs], of which those that turn often are kept, and others divided.

    plain: the frequencies before the scaling. Between the pairs of channels that turn `fast_turns`
    and `slow_turns` times within the original context, shares of both change linearly.
    """
    dim = 2 * len(plain)

    def channel(turns: float) -> float:
        """The pair that turns so often within the original context."""
        wavelength = scaling.original_context / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(theta))

    first, last = channel(scaling.fast_turns), channel(scaling.slow_turns)
    if scaling.whole_channels:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    ramp = (jnp.arange(dim // 2, dtype=jnp.float32) - first) / max(last - first, 0.001)
    divided = jnp.clip(ramp, 0.0, 1.0)
    return plain * (1 - divided) + plain / scaling.factor * divided


def yarn_attention_factor(factor: float) -> float:
    """The factor of queries and keys for a context that is `factor` times as long."""
    return 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
