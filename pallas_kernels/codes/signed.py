"""Signed integers with a scale per output channel: the weights of W8A8."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from mpjax.kernels.codes.base import CodeKind, Decoder, Group, Parameters, Spelling, divisible
from mpjax.kernels.target import current_target

if TYPE_CHECKING:
    from mpjax.kernels.formats import WeightFormat


class Signed(CodeKind):
    """W = code · scale; the codes are the int8 operand itself."""

    bits = 8
    group_sizes: tuple[int | None, ...] = (None,)
    operands = ("int8",)
    spellings = (Spelling("8", "8", None),)
    code_dtype = jnp.dtype(jnp.int8)
    scale_dtypes = ("float32",)

    def fit(
        self, groups: jax.Array, format: WeightFormat, table: jax.Array | None = None
    ) -> Parameters:
        """Per output channel: scale = max|w| / 127 (SmoothQuant's convention)."""
        return Parameters(divisible(jnp.abs(groups).max(1) * (1 / 127)))

    def nearest(self, values: jax.Array, parameters: Parameters) -> jax.Array:
        """round(value / scale), clamped to −127 … 127."""
        return jnp.clip(jnp.round(values / parameters.scales), -127, 127).astype(jnp.int8)

    def decode(self, codes: jax.Array, parameters: Parameters) -> jax.Array:
        """Code · scale."""
        return codes.astype(jnp.float32) * parameters.scales

    def load(
        self, parameters: jax.Array, scale_dtype: str, operand: jnp.dtype, width: int
    ) -> Group:
        """The scale of the output channels."""
        scale = jax.lax.bitcast_convert_type(parameters, jnp.float32)
        return Group(current_target().column(scale, width))

    def decoder(
        self,
        columns: list[jax.Array],
        arguments: tuple[jax.Array, ...],
        shared: tuple[jax.Array, ...],
        operand: jnp.dtype,
    ) -> Decoder:
        """A decoder that returns the words, which are the operand already."""
        return lambda plane: columns[0]
