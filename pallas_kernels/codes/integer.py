"""Integer codes minus a zero point: AWQ, GPTQ and round-to-nearest, four or eight bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels import bits as bit_planes
from pallas_kernels.codes.base import CodeKind, Decoder, Group, Quantized, by_group, scaled
from pallas_kernels.formats import WeightFormat
from pallas_kernels.rounding import round_to

if TYPE_CHECKING:
    from pallas_kernels.quantized_tensor import QuantizedTensor


class Integer(CodeKind):
    """W = (code − zero) · scale."""

    has_zeros = True

    def __init__(self, bits: int):
        self.bits = bits

    def quantize(self, weight: jax.Array, format: WeightFormat) -> Quantized:
        """Rounds to the nearest codes, with the float16 scale that is stored.

        Asymmetric: scale = (max − min) / (2**b − 1) over a range that includes zero, zero point =
        round(−min / scale). Symmetric: scale = 2·max|w| / (2**b − 1), zero point 2**(b − 1), as
        GPTQ's quantiser. The scale's own rounding costs nothing but at the ends of a range. A group
        of zeros stays zero.
        """
        groups = by_group(weight, format.groups(weight.shape[0]))
        top = 2**self.bits - 1
        low = jnp.minimum(groups.min(1), 0.0)
        high = jnp.maximum(groups.max(1), 0.0)
        if format.symmetric:
            high = jnp.maximum(-low, high)
            low = -high
        # Products in the place of divisions, as XLA would have them anyway.
        steps = round_to((high - low) * (1 / top), jnp.float16)
        steps = jnp.where(steps == 0, 1.0, steps)
        inverse = 1 / steps
        if format.symmetric:
            zeros = jnp.full_like(steps, 2 ** (self.bits - 1))
        else:
            zeros = jnp.clip(jnp.round(-low * inverse), 0, top)
        codes = jnp.clip(jnp.round(groups * inverse[:, None]) + zeros[:, None], 0, top)
        codes = codes.reshape(weight.shape).astype(jnp.uint8)
        return Quantized(codes, steps.astype(jnp.float16), zeros)

    def dequantize(self, codes: jax.Array, tensor: QuantizedTensor, scales: jax.Array) -> jax.Array:
        """(code − zero) · scale."""
        centred = by_group(codes.astype(jnp.float32), len(scales))
        centred -= tensor.zeros()[: len(scales)].astype(jnp.float32)[:, None]
        return scaled(centred.reshape(codes.shape), scales)

    def pack(self, planes: jax.Array) -> jax.Array:
        """Plane j is bits j·b … of a word."""
        return bit_planes.pack_planes(planes, self.bits)[..., None, :]

    def unpack(self, words: jax.Array) -> jax.Array:
        """The inverse of `pack`."""
        return bit_planes.unpack_planes(words[..., 0, :], self.bits)

    def load(self, parameters: jax.Array, scale_dtype: str, operand: jnp.dtype) -> Group:
        """The scale of what is decoded, below 2**122, and the zero point as an operand."""
        scale, zero = bit_planes.unpack_pair(parameters, scale_dtype, jnp.int16)
        scale = scale.astype(jnp.float32) * 2.0 ** -bit_planes.plane_exponent(operand)
        return Group(scale[:, None], (zero.astype(operand)[:, None],))

    def decoder(
        self,
        columns: list[jax.Array],
        arguments: tuple[jax.Array, ...],
        shared: tuple[jax.Array, ...],
        operand: jnp.dtype,
        *,
        ptx: bool,
    ) -> Decoder:
        """Code − zero, exact, times a power of two that its scale makes up for."""
        [words], [zero] = columns, arguments
        return lambda plane: bit_planes.decode_plane(words, plane, self.bits, zero, ptx=ptx)
