"""Signed integers with a scale per output channel: the weights of W8A8."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mpjax.kernels.codes.base import CodeKind, Decoder, Group, divisible, scaled
from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.plain_codes import PlainCodes
from mpjax.kernels.target import current_target


class Signed(CodeKind):
    """W = code · scale, with codes that are the int8 operand themselves."""

    code_dtype = jnp.dtype(jnp.int8)
    scale_dtypes = ("float32",)

    def quantize(self, weight: jax.Array, format: WeightFormat) -> PlainCodes:
        """Per output channel: scale = max|w| / 127 (SmoothQuant's convention)."""
        scales = divisible(jnp.abs(weight).max(0, keepdims=True) * (1 / 127))
        codes = jnp.clip(jnp.round(weight / scales), -127, 127).astype(jnp.int8)
        return PlainCodes(format, codes, scales)

    def dequantize(self, plain: PlainCodes) -> jax.Array:
        """Code · scale."""
        return scaled(plain.codes, plain.scales)

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
        """A decoder that returns the words, which are the operand."""
        return lambda plane: columns[0]
