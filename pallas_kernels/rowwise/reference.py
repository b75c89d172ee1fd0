"""The operations between two products in plain jnp, computed in float32."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from mpjax.kernels.activation_blocks import ActivationBlocks
from mpjax.kernels.activations import QuantizedActivations, quantize_activations
from mpjax.kernels.divided_rows import DividedRows
from mpjax.kernels.invariance import in_row_tiles
from mpjax.kernels.product_format import ActivationFormat
from mpjax.kernels.rounding import narrow
from mpjax.kernels.rowwise.hadamard import transformed
from mpjax.kernels.static_rows import StaticRows

Rounding = ActivationFormat | ActivationBlocks | DividedRows | StaticRows


def quantizes(format: Rounding | None) -> bool:
    """Whether activations become codes here: with one scale per token, or in blocks."""
    return isinstance(format, ActivationBlocks) or (format is not None and format.scales_rows)


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """The norm of x [..., H] in float32; see the public function."""
    wide = x.astype(jnp.float32)

    def factors(rows: jax.Array) -> jax.Array:
        return jax.lax.rsqrt(jnp.mean(rows * rows, -1, keepdims=True) + epsilon)

    wide *= in_row_tiles(factors, wide)  # on a CPU `rsqrt` depends on the number of rows, too
    return wide * jax.lax.broadcast_to_rank(weight.astype(jnp.float32), wide.ndim)


def row_means(x: jax.Array) -> jax.Array:
    """The means [..., 1] of x [..., K], of each row by itself."""
    return in_row_tiles(functools.partial(jnp.mean, axis=-1, keepdims=True), x)


def add_rms_norm(
    terms: jax.Array,
    residual: jax.Array | None,
    weight: jax.Array,
    epsilon: float,
    format: Rounding | None = None,
    dtype: jnp.dtype | None = None,
) -> tuple[jax.Array, jax.Array | QuantizedActivations]:
    """The stream and its norm; see the public function."""
    wide = terms.astype(jnp.float32).sum(0)
    if residual is not None:
        wide += residual.astype(jnp.float32)
    dtype = weight.dtype if dtype is None else dtype
    stream = narrow(wide, dtype)
    return stream, _rounded(rms_norm(stream, weight, epsilon), format, dtype)


def gated(
    terms: jax.Array,
    activation: str,
    dtype: jnp.dtype,
    format: Rounding | None = None,
    hadamard: int | None = None,
) -> jax.Array | QuantizedActivations:
    """activation(gate) · up; see the public function."""
    gate, up = jnp.split(terms.astype(jnp.float32).sum(0), 2, axis=-1)
    wide = gate * jax.nn.sigmoid(ACTIVATIONS[activation](gate)) * up
    return _rounded(wide if hadamard is None else transformed(wide, hadamard), format, dtype)


def _gelu_argument(gate: jax.Array) -> jax.Array:
    """The argument of the sigmoid that, times the gate, is GELU's tanh approximation."""
    return GELU_SCALE * (gate + 0.044715 * gate * gate * gate)


GELU_SCALE = 2 * math.sqrt(2 / math.pi)
# Name → f of the activation gate · sigmoid(f(gate)).
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": lambda gate: gate,
    "gelu": _gelu_argument,
}


def _rounded(
    wide: jax.Array, format: Rounding | None, dtype: jnp.dtype
) -> jax.Array | QuantizedActivations:
    if format is not None and quantizes(format):
        return quantize_activations(wide, format, dtype)
    return wide.astype(dtype)
