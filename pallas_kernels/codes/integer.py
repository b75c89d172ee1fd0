"""Integer codes minus a zero point: AWQ, GPTQ and round-to-nearest, four or eight bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from mpjax.kernels import bits as bit_planes
from mpjax.kernels.codes.base import (
    GROUP_SIZES,
    CodeKind,
    Decoder,
    Group,
    Parameters,
    Spelling,
)
from mpjax.kernels.rounding import round_to
from mpjax.kernels.target import current_target

if TYPE_CHECKING:
    from mpjax.kernels.formats import WeightFormat


class Integer(CodeKind):
    """W = (code − zero) · scale."""

    group_sizes = (*GROUP_SIZES, None)
    has_zeros = True

    def __init__(self, bits: int):
        self.bits = bits
        self.spellings = (Spelling(str(bits), "16", 128),)

    def fit(
        self, groups: jax.Array, format: WeightFormat, table: jax.Array | None = None
    ) -> Parameters:
        """Fits scale = (max − min) / (2**bits − 1) and zero point = round(−min / scale).

        The range min … max includes zero. Scales are rounded to float16, as they are stored, before
        codes are chosen; this loses accuracy only at the ends of a range. A group of zeros has
        scale 1.
        """
        low = jnp.minimum(groups.min(1), 0.0)
        steps = self._steps(jnp.maximum(groups.max(1), 0.0) - low)
        zeros = jnp.clip(jnp.round(-low * (1 / steps)), 0, 2**self.bits - 1)
        return Parameters(steps.astype(jnp.float16), zeros.astype(jnp.uint16))

    def _steps(self, ranges: jax.Array) -> jax.Array:
        """Scales [groups, N] for ranges, rounded to float16; 1 for an empty range.

        It multiplies by reciprocals, because XLA may compile divisions to that.
        """
        steps = round_to(ranges * (1 / (2**self.bits - 1)), jnp.float16)
        return jnp.where(steps == 0, 1.0, steps)

    def nearest(self, values: jax.Array, parameters: Parameters) -> jax.Array:
        """round(value / scale) + zero, clamped to the range of codes."""
        codes = jnp.round(values * (1 / parameters.scales.astype(jnp.float32)))
        codes = jnp.clip(codes + self._zeros(parameters), 0, 2**self.bits - 1)
        return codes.astype(jnp.uint8)

    def decode(self, codes: jax.Array, parameters: Parameters) -> jax.Array:
        """(code − zero) · scale."""
        centred = codes.astype(jnp.float32) - self._zeros(parameters)
        return centred * parameters.scales.astype(jnp.float32)

    def _zeros(self, parameters: Parameters) -> jax.Array:
        if parameters.zeros is None:
            return jnp.full_like(parameters.scales, self.zero_point, jnp.float32)
        return parameters.zeros.astype(jnp.float32)

    def load(
        self, parameters: jax.Array, scale_dtype: str, operand: jnp.dtype, width: int
    ) -> Group:
        """Unpacks words of parameters [tile_n], each a scale and a zero point of 16 bits.

        The group's scale, float32 [tile_n, 1], includes the inverse of the power of two by which
        `bits.decode_plane` scales codes; so a stored scale must be below 2**122. The zero point, in
        the dtype `operand`, is the argument of the decoder.
        """
        scale, zero = bit_planes.unpack_pair(parameters, scale_dtype, jnp.int16)
        scale = scale.astype(jnp.float32) * 2.0 ** -bit_planes.plane_exponent(operand)
        column = current_target().column
        return Group(column(scale, width), (column(zero.astype(operand), width),))

    def decoder(
        self,
        columns: list[jax.Array],
        arguments: tuple[jax.Array, ...],
        shared: tuple[jax.Array, ...],
        operand: jnp.dtype,
    ) -> Decoder:
        """Decodes to code − zero, exact, times a power of two that the scale compensates."""
        [words], [zero] = columns, arguments
        return lambda plane: bit_planes.decode_plane(words, plane, self.bits, zero)


class Symmetric(Integer):
    """W = (code − 2**(bits − 1)) · scale.

    With one zero point for all groups, a code becomes a scaled weight in one multiply-add, since
    the zero point times a scale is exact. The scale is rounded to bfloat16 first, like all scales
    of bfloat16 weights, and must be between 1e-17 and 1e17.
    """

    has_zeros = False

    def __init__(self, bits: int):
        super().__init__(bits)
        self.zero_point = 2 ** (bits - 1)

    def fit(
        self, groups: jax.Array, format: WeightFormat, table: jax.Array | None = None
    ) -> Parameters:
        """Scale = 2·max|w| / (2**b − 1), as GPTQ's quantiser."""
        return Parameters(self._steps(2 * jnp.abs(groups).max(1)).astype(jnp.float16))

    def scaled_decoder(
        self,
        columns: list[jax.Array],
        group: Group,
        shared: tuple[jax.Array, ...],
        operand: jnp.dtype,
    ) -> Decoder:
        """A decoder with one multiply-add for two weights in bfloat16.

        float16 lacks the range for that, and takes two instructions, as asymmetric codes do.
        """
        if operand != jnp.bfloat16:
            return super().scaled_decoder(columns, group, shared, operand)
        assert group.scale is not None
        [words] = columns
        step = (group.scale * 2.0 ** bit_planes.plane_exponent(operand)).astype(operand)
        negative_zero = -self.zero_point * 2.0 ** self.scaled_exponent(operand)
        zero = step * jnp.asarray(negative_zero, operand)
        return lambda plane: bit_planes.decode_scaled(words, plane, self.bits, step, zero)

    def scaled_exponent(self, operand: jnp.dtype) -> int:
        """The exponent of the power of two by which `bits.decode_scaled` scales weights."""
        return bit_planes.exponent_scaled(operand)
