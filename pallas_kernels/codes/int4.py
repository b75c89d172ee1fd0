"""Signed integers of four bits with a scale per group: the weights of COMET's W4Ax."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from mpjax.kernels.codes.base import (
    Decoder,
    Group,
    Parameters,
    Spelling,
    divisible,
    require_range,
)
from mpjax.kernels.codes.signed import Signed
from mpjax.kernels.target import current_target

if TYPE_CHECKING:
    from mpjax.kernels.formats import WeightFormat
    from mpjax.kernels.plain_codes import PlainCodes

BITS = 4
# The number of input channels that share a scale, in weights and in their activations.
GROUP = 128
LEAST, MOST = -8, 7
# Codes are decoded into the upper half of a byte, which saves the sign extension.
EXPONENT = 4


class Int4(Signed):
    """W = code · scale, with codes from −8 to 7 that kernels multiply as int8.

    A sum of 128 products of code and int8 activation, times 16, stays below 2**21 in magnitude. So
    decoding may return 16 · code, which the scale compensates.
    """

    bits = BITS
    group_sizes = (GROUP,)
    spellings = (Spelling("4", "x", GROUP),)
    may_cut_groups = True

    def require_values(self, plain: PlainCodes) -> None:
        """As in CodeKind; codes are from −8 to 7."""
        super().require_values(plain)
        require_range("codes", plain.codes, MOST, LEAST)

    def fit(
        self, groups: jax.Array, format: WeightFormat, table: jax.Array | None = None
    ) -> Parameters:
        """Scale = 2·max|w| / (2**b − 1), as GPTQ's quantiser."""
        return Parameters(divisible(jnp.abs(groups).max(1) * (2 / (2**BITS - 1))))

    def nearest(self, values: jax.Array, parameters: Parameters) -> jax.Array:
        """round(value / scale), clamped to the range of codes."""
        return jnp.clip(jnp.round(values / parameters.scales), LEAST, MOST).astype(jnp.int8)

    def pack(self, planes: jax.Array) -> jax.Array:
        """Packs plane 0 to the low half of a byte, and plane 1 to the high half."""
        low, high = planes[..., 0, :], planes[..., 1, :]
        return ((low & jnp.uint8(0xF)) | (high << jnp.uint8(BITS)))[..., None, :]

    def unpack(self, words: jax.Array) -> jax.Array:
        """The inverse of `pack`: codes in two's complement of 8 bits."""
        words = words[..., 0, :]
        planes = jnp.stack([words & jnp.uint8(0xF), words >> jnp.uint8(BITS)], -2)
        return (planes ^ jnp.uint8(8)) - jnp.uint8(8)

    def load(
        self, parameters: jax.Array, scale_dtype: str, operand: jnp.dtype, width: int
    ) -> Group:
        """The scale for decoded codes, and the words of parameters.

        The decoder takes the words so that the compiler pipelines their load.
        """
        scale = jax.lax.bitcast_convert_type(parameters, jnp.float32) * 2.0**-EXPONENT
        return Group(current_target().column(scale, width), (parameters,))

    def decoder(
        self,
        columns: list[jax.Array],
        arguments: tuple[jax.Array, ...],
        shared: tuple[jax.Array, ...],
        operand: jnp.dtype,
    ) -> Decoder:
        """Decodes to 16 · code in int8, with one or two instructions for four codes."""
        [words], [parameters] = columns, arguments
        target = current_target()
        if target.has_ptx:
            registers = target.register_column(parameters, words.shape)
            return lambda plane: _decode_with_ptx(words, plane, registers)
        return lambda plane: _decode(words, plane)


def _decode(words: jax.Array, plane: int) -> jax.Array:
    high = words & jnp.uint8(0xF0) if plane else words << jnp.uint8(BITS)
    return jax.lax.bitcast_convert_type(high, jnp.int8)


def _decode_with_ptx(words: jax.Array, plane: int, parameters: jax.Array) -> jax.Array:
    shifted = "$1" if plane else "high"
    move = "" if plane else f"shl.b32 high, $1, {BITS};"
    assembly = f"""{{
        .reg .b32 high;
        {move}
        and.b32 $0, {shifted}, 0xF0F0F0F0;
    }}"""
    return current_target().inline_ptx(assembly, words, parameters, dtype=jnp.int8)
