"""The layers that decoders are made of. None holds state: calling one changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.config import DecoderConfig, RopeScaling
from pallas_kernels import QuantizedTensor, matmul


class Linear(nnx.Module):
    """x · kernel + bias, with a kernel [in, out] in any weight format."""

    def __init__(self, kernel: jax.Array | QuantizedTensor, bias: jax.Array | None = None):
        self.kernel = nnx.Param(kernel)
        self.bias = None if bias is None else nnx.Param(bias)

    @classmethod
    def create(cls, shape: tuple[int, int], *, bias: bool, dtype: str, rngs: nnx.Rngs) -> Linear:
        """A randomly initialised map (normal, 0.02) of `shape` [in, out]."""
        kernel = nnx.initializers.normal(0.02)(rngs.params(), shape, jnp.dtype(dtype))
        return cls(kernel, jnp.zeros(shape[1], dtype) if bias else None)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [..., in] to [..., out]."""
        kernel: Any = self.kernel.get_value()
        y = matmul(x, kernel)
        return y if self.bias is None else y + self.bias.get_value()


class FusedLinear(nnx.Module):
    """Linear maps of one input as one product; returns the output of each.

    parts: a single Linear over all outputs, or several over neighbouring ones where their formats
    forbid fusing. sizes: output channels of each map that the caller gets back.
    """

    def __init__(self, parts: Sequence[Linear], sizes: tuple[int, ...]):
        self.parts = nnx.List(parts)
        self.sizes = sizes

    def __call__(self, x: jax.Array) -> list[jax.Array]:
        """Maps [..., in] to one array [..., size] for each of `sizes`."""
        outputs = [part(x) for part in self.parts]
        if len(outputs) == len(self.sizes):
            return outputs
        joined = jnp.concatenate(outputs, -1) if len(outputs) > 1 else outputs[0]
        ends = [sum(self.sizes[: i + 1]) for i in range(len(self.sizes) - 1)]
        return jnp.split(joined, ends, axis=-1)


class RMSNorm(nnx.Module):
    """x / √(mean(x²) + ε) · weight over the last axis, computed in float32."""

    def __init__(self, size: int, epsilon: float, dtype: str):
        self.weight = nnx.Param(jnp.ones(size, dtype))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises x over its last axis; the same shape and dtype."""
        wide = x.astype(jnp.float32)
        wide *= jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.epsilon)
        return (wide * self.weight.get_value().astype(jnp.float32)).astype(x.dtype)


class GatedMLP(nnx.Module):
    """down(SiLU(gate(x)) · up(x))."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        hidden, inner = config.projection_shapes["gate"]
        fused = Linear.create(
            (hidden, 2 * inner), bias=config.mlp_bias, dtype=config.dtype, rngs=rngs
        )
        self.gate_up = FusedLinear([fused], (inner, inner))
        self.down = Linear.create(
            (inner, hidden), bias=config.mlp_bias, dtype=config.dtype, rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [..., hidden] to the same shape."""
        gate, up = self.gate_up(x)
        return self.down(jax.nn.silu(gate) * up)


def rotary_frequencies(dim: int, theta: float, scaling: RopeScaling | None) -> jax.Array:
    """Angle per position of each channel pair, float32 [dim / 2] (RoFormer, Llama 3.1)."""
    frequencies = theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # Share of the original frequency: 1 above the high-frequency bound, 0 below the low one.
    turns = scaling.original_context * frequencies / (2 * jnp.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    share = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (share + (1 - share) / scaling.factor)


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotary embedding of x [batch, tokens, heads, dim] by angles [batch, tokens, dim / 2].

    Channel i turns with channel i + dim / 2, the convention of Hugging Face checkpoints.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, -1).astype(x.dtype)
