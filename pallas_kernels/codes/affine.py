"""Integer codes with a scale and a float minimum for each group: GGUF's Q4_1 and Q4_K, and HQQ.

HQQ's float zero point corresponds to a minimum of −zero · scale. The minimum stays exact if all
weights of a group are equal, so that the scale is zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from mpjax.kernels import bits as bit_planes
from mpjax.kernels.codes.base import CodeKind, Decoder, Group, Parameters, Spelling
from mpjax.kernels.rounding import round_to
from mpjax.kernels.target import current_target

if TYPE_CHECKING:
    from mpjax.kernels.formats import WeightFormat


class Affine(CodeKind):
    """W = code · scale + minimum, both float16.

    The zeros of `Parameters` and `PlainCodes` are the minima. In a product with bfloat16, scale and
    minimum are rounded to bfloat16 first, like all scales of bfloat16 weights.
    """

    scale_dtypes = ("float16",)
    has_zeros = True
    has_minima = True
    has_group_scales = False

    def __init__(self, bits: int):
        self.bits = bits
        self.spellings = (Spelling(f"M{bits}", "16", 32),)

    def fit(
        self, groups: jax.Array, format: WeightFormat, table: jax.Array | None = None
    ) -> Parameters:
        """Fits minimum = min and scale = (max − min) / (2**bits − 1), rounded to float16.

        A group of equal weights gets the scale 1.
        """
        minima = round_to(groups.min(1), jnp.float16)
        scales = round_to((groups.max(1) - minima) * (1 / (2**self.bits - 1)), jnp.float16)
        scales = jnp.where(scales <= 0, 1.0, scales)
        return Parameters(scales.astype(jnp.float16), minima.astype(jnp.float16))

    def nearest(self, values: jax.Array, parameters: Parameters) -> jax.Array:
        """round((value − minimum) / scale), clamped to the range of codes."""
        scales, minima = self._floats(parameters)
        codes = jnp.round((values - minima) * (1 / scales))
        return jnp.clip(codes, 0, 2**self.bits - 1).astype(jnp.uint8)

    def decode(self, codes: jax.Array, parameters: Parameters) -> jax.Array:
        """Code · scale + minimum; the product is exact in float32."""
        scales, minima = self._floats(parameters)
        return codes.astype(jnp.float32) * scales + minima

    def _floats(self, parameters: Parameters) -> tuple[jax.Array, jax.Array]:
        assert parameters.zeros is not None
        return parameters.scales.astype(jnp.float32), parameters.zeros.astype(jnp.float32)

    def unpack_parameters(self, words: jax.Array, scale_dtype: str) -> tuple[jax.Array, jax.Array]:
        """The inverse of `pack_parameters`: scales and minima."""
        return bit_planes.unpack_pair(words, scale_dtype, scale_dtype)

    def load(
        self, parameters: jax.Array, scale_dtype: str, operand: jnp.dtype, width: int
    ) -> Group:
        """Unpacks words of parameters [tile_n] to a step and a minimum in the dtype `operand`.

        The minimum is scaled by 2**`scaled_exponent`, like the decoder's result.
        """
        step, minimum = bit_planes.widen_pair(parameters, scale_dtype)
        minimum = minimum * 2.0 ** self.scaled_exponent(operand)
        column = current_target().column
        return Group(None, tuple(column(x.astype(operand), width) for x in (step, minimum)))

    def decoder(
        self,
        columns: list[jax.Array],
        arguments: tuple[jax.Array, ...],
        shared: tuple[jax.Array, ...],
        operand: jnp.dtype,
    ) -> Decoder:
        """Decodes to (code · scale + minimum) · 2**`scaled_exponent`, rounded once.

        It takes one multiply-add for two weights in bfloat16, and two in float16.
        """
        [words], [step, minimum] = columns, arguments
        return lambda plane: bit_planes.decode_scaled(words, plane, self.bits, step, minimum)

    def scaled_exponent(self, operand: jnp.dtype) -> int:
        """The exponent of the power of two by which `bits.decode_scaled` scales weights."""
        return bit_planes.exponent_scaled(operand)
