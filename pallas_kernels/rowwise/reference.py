"""The operations between two products in plain jnp, computed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mpjax.kernels.activation_blocks import ActivationBlocks
from mpjax.kernels.activations import QuantizedActivations, quantize_activations
from mpjax.kernels.product_format import ActivationFormat
from mpjax.kernels.rounding import narrow

Rounding = ActivationFormat | ActivationBlocks


def quantizes(format: Rounding | None) -> bool:
    """Whether activations become codes here: with one scale per token, or in blocks."""
    return isinstance(format, ActivationBlocks) or (format is not None and format.scales_rows)


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """The norm of x [..., H] in float32; see the public function."""
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + epsilon)
    return wide * jax.lax.broadcast_to_rank(weight.astype(jnp.float32), wide.ndim)


def add_rms_norm(
    terms: jax.Array,
    residual: jax.Array | None,
    weight: jax.Array,
    epsilon: float,
    format: Rounding | None = None,
) -> tuple[jax.Array, jax.Array | QuantizedActivations]:
    """The stream and its norm; see the public function."""
    wide = terms.astype(jnp.float32).sum(0)
    if residual is not None:
        wide += residual.astype(jnp.float32)
    stream = narrow(wide, weight.dtype)
    return stream, _rounded(rms_norm(stream, weight, epsilon), format, weight.dtype)


def gated_silu(
    terms: jax.Array, dtype: jnp.dtype, format: Rounding | None = None
) -> jax.Array | QuantizedActivations:
    """SiLU(gate) · up; see the public function."""
    gate, up = jnp.split(terms.astype(jnp.float32).sum(0), 2, axis=-1)
    return _rounded(gate * jax.nn.sigmoid(gate) * up, format, dtype)


def _rounded(
    wide: jax.Array, format: Rounding | None, dtype: jnp.dtype
) -> jax.Array | QuantizedActivations:
    if format is not None and quantizes(format):
        return quantize_activations(wide, format, dtype)
    return wide.astype(dtype)
