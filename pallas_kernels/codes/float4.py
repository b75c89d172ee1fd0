"""FP4 (e2m1) codes with a power of two for every 32 input channels: MXFP4.

The format is that of OCP's Microscaling Formats v1.0 (sections 5.3 and 6.3): a code has a sign, two
bits of exponent and one of mantissa. Words have planes of four bits, as for `uint4`.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels.checks import is_known
from mpjax.kernels.codes.base import CodeKind, Decoder, Group, Parameters, Spelling
from mpjax.kernels.target import current_target

if TYPE_CHECKING:
    from mpjax.kernels.formats import WeightFormat
    from mpjax.kernels.plain_codes import PlainCodes

# The magnitudes of codes 0 to 7; codes 8 to 15 are their negatives.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES))  # the values of codes 0 to 15
LARGEST_EXPONENT = 2  # of a code
_EXPONENT_BITS = 0x7F800000  # of float32
_MANTISSA_BITS = 7  # of bfloat16, whose exponent has the bias of e8m0
_BIAS = 127  # of the exponents of e8m0 and of float32
_NAN = 255  # the byte of e8m0 that means NaN
# Bit patterns in bfloat16: of 2**−127, which is subnormal; of infinity, which has the exponent
# field 255 (NaN in e8m0); and of NaN.
_LEAST_SCALE, _INFINITY, _NOT_A_NUMBER = 0x0040, 0x7F80, 0x7FC0
_HALF_BITS = 16  # the low bits of a float32 number, which bfloat16 does not have


class Float4(CodeKind):
    """W = e2m1(code) · scale. Scales are powers of two, in bfloat16, which represents all of e8m0.

    A 32-bit parameter word has the exponents of four neighbouring groups (128 input channels).
    Kernels decode exponent 255, which is NaN in e8m0, as infinity, so the outputs that use it are
    infinite or NaN.
    """

    bits = 4
    group_sizes = (32,)
    spellings = (Spelling("MXFP4", "16", 32),)
    scale_dtypes = ("bfloat16",)
    groups_of_word = scales_of_word = 4
    why_scales_are_fixed = "has exponents for scales, which other scales can't replace"

    def fit(
        self, groups: jax.Array, format: WeightFormat, table: jax.Array | None = None
    ) -> Parameters:
        """Scale = 2**(⌊log2 max|w|⌋ − 2), as in the specification; 1 for a group of zeros.

        Weights beyond 6 · scale are clipped.
        """
        peak = jnp.abs(groups).max(1)  # [groups, N]
        bits = jax.lax.bitcast_convert_type(peak, jnp.uint32) & jnp.uint32(_EXPONENT_BITS)
        power = jax.lax.bitcast_convert_type(bits, jnp.float32)
        scales = jnp.where(power == 0, 1.0, power * 2.0**-LARGEST_EXPONENT)
        return Parameters(scales.astype(jnp.bfloat16))

    def nearest(self, values: jax.Array, parameters: Parameters) -> jax.Array:
        """The code nearest to value / scale; ties go to the code with mantissa 0."""
        scaled = jnp.abs(values) * (1 / parameters.scales.astype(jnp.float32))
        code = jnp.zeros(scaled.shape, jnp.uint8)
        for index, (low, high) in enumerate(itertools.pairwise(MAGNITUDES)):
            middle = (low + high) / 2
            is_above = scaled >= middle if index % 2 else scaled > middle
            code += is_above.astype(jnp.uint8)
        return code | jnp.where(values < 0, jnp.uint8(8), jnp.uint8(0))

    def decode(self, codes: jax.Array, parameters: Parameters) -> jax.Array:
        """e2m1(code) · scale; NaN where the scale's exponent is 255.

        The scale is a product of two powers of two, because XLA on a CPU flushes the subnormal
        2**−127 to zero. Comparing scales with 2**−127 instead fails on a GPU: if XLA fuses the
        comparison with `scales_of`, max(x << 7, 64) == 64 is always true.
        """
        values = jnp.asarray(np.array(E2M1, np.float32))
        bits = jax.lax.bitcast_convert_type(parameters.scales, jnp.uint16)
        exponent = (bits >> jnp.uint16(_MANTISSA_BITS)).astype(jnp.int32)
        half = exponent >> 1
        first = jnp.where(exponent == _NAN, jnp.nan, _power(half - _BIAS // 2))
        return values[codes] * first * _power(exponent - half - (_BIAS - _BIAS // 2))

    def require_values(self, plain: PlainCodes) -> None:
        """As in CodeKind; scales are powers of two from 2**−127, 0 or NaN.

        Bits are compared, since XLA on a CPU flushes subnormals to zero.
        """
        super().require_values(plain)
        if not is_known(plain.scales):
            return
        with jax.ensure_compile_time_eval():
            given = jnp.asarray(plain.scales)
            kept = scales_of(exponents_of(given))
            bits, kept_bits = (jax.lax.bitcast_convert_type(x, jnp.uint16) for x in (given, kept))
            is_kept = (bits == kept_bits) | (bits == 0) | jnp.isnan(given)
            if not is_kept.all():
                raise ValueError(
                    f"scales of float4 are {float(given[~is_kept][0]):.4g}, among others: expected "
                    "powers of two, of which the exponent is kept"
                )

    def pack_parameters(self, scales: jax.Array, zeros: jax.Array) -> jax.Array:
        """Packs the exponents of four groups to a word, the first group's in its lowest byte.

        Scales of 0, which padding has, become 2**−127.
        """
        *leading, groups, outputs = scales.shape
        exponents = exponents_of(scales).astype(jnp.uint32)
        exponents = exponents.reshape(*leading, groups // 4, 4, outputs)
        parts = (exponents[..., i, :] << jnp.uint32(8 * i) for i in range(4))
        return functools.reduce(jnp.bitwise_or, parts)

    def unpack_parameters(self, words: jax.Array, scale_dtype: str) -> tuple[jax.Array, jax.Array]:
        """The inverse of `pack_parameters`."""
        parts = jnp.stack([words >> jnp.uint32(8 * i) for i in range(4)], -2)
        exponents = parts.astype(jnp.uint8).reshape(*words.shape[:-2], -1, words.shape[-1])
        scales = scales_of(exponents)
        return scales, jnp.zeros_like(scales, jnp.uint16)

    def load(
        self, parameters: jax.Array, scale_dtype: str, operand: jnp.dtype, width: int
    ) -> Group:
        """The scale, from the lowest byte, and a tile that decoding doesn't use (see Group)."""
        exponent = parameters & jnp.uint32(0xFF)
        bits = exponent << jnp.uint32(_MANTISSA_BITS + _HALF_BITS)
        bits = jnp.maximum(bits, jnp.uint32(_LEAST_SCALE << _HALF_BITS))
        scale = jax.lax.bitcast_convert_type(bits, jnp.float32)
        carried = exponent.astype(jnp.uint16).astype(jnp.int16)
        column = current_target().column
        return Group(column(scale, width), (column(carried, width),))

    def decoder(
        self,
        columns: list[jax.Array],
        arguments: tuple[jax.Array, ...],
        shared: tuple[jax.Array, ...],
        operand: jnp.dtype,
    ) -> Decoder:
        """Decodes to e2m1(code), which both operand dtypes represent exactly."""
        [words], [carried] = columns, arguments
        return lambda plane: _decode_plane(words, plane, operand, carried)


def exponents_of(scales: jax.Array) -> jax.Array:
    """The exponents of e8m0, uint8, of scales in bfloat16 that are powers of two, 0 or NaN."""
    bits = jax.lax.bitcast_convert_type(scales, jnp.uint16) >> jnp.uint16(_MANTISSA_BITS)
    return bits.astype(jnp.uint8)


def scales_of(exponents: jax.Array) -> jax.Array:
    """The scales in bfloat16, 2**(exponent − 127), of exponents uint8; of 255, NaN."""
    bits = exponents.astype(jnp.uint16) << jnp.uint16(_MANTISSA_BITS)
    bits = jnp.maximum(bits, jnp.uint16(_LEAST_SCALE))
    bits = jnp.where(bits == jnp.uint16(_INFINITY), jnp.uint16(_NOT_A_NUMBER), bits)
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)


def _power(exponent: jax.Array) -> jax.Array:
    """2**exponent in float32, of an int32 exponent between −126 and 127."""
    return jax.lax.bitcast_convert_type((exponent + _BIAS) << 23, jnp.float32)


def _decode_plane(
    words: jax.Array, plane: int, operand: jnp.dtype, carried: jax.Array
) -> jax.Array:
    """Decodes four bits of each uint16 word to bfloat16 or float16.

    The code's exponent and mantissa become the low bits of the operand's exponent and the top of
    its mantissa. One product then corrects the exponent bias, and normalises 0.5, which is a
    subnormal.

    carried: unused; see Group.arguments.
    """
    target = current_target()
    if not target.has_ptx:
        # Via float16, since XLA on a CPU flushes subnormals of float32 to zero.
        code = words >> jnp.uint16(4 * plane)
        moved = (code & jnp.uint16(7)) << jnp.uint16(9) | (code & jnp.uint16(8)) << jnp.uint16(12)
        tiny = jax.lax.bitcast_convert_type(moved, jnp.float16)
        return (tiny.astype(jnp.float32) * 2.0**14).astype(operand)
    is_bfloat = operand == jnp.bfloat16
    place, factor, suffix = (6, 0x7E80, "bf16x2") if is_bfloat else (9, 0x7400, "f16x2")
    magnitude = 0x00070007 << place
    assembly = f"""{{
        .reg .b32 moved, sign, factor, zero;
        mov.b32 factor, 0x{factor:04X}{factor:04X};
        mov.b32 zero, 0x80008000;
        {_shift("moved", place - 4 * plane)}
        {_shift("sign", 12 - 4 * plane)}
        and.b32 moved, moved, 0x{magnitude:08X};
        lop3.b32 moved, sign, 0x80008000, moved, 0xEA;
        fma.rn.{suffix} $0, moved, factor, zero;
    }}"""
    return target.inline_ptx(assembly, words, jnp.broadcast_to(carried, words.shape), dtype=operand)


def _shift(register: str, places: int) -> str:
    """PTX that shifts the words in $1 left by `places`, or right if it is negative."""
    if places >= 0:
        return f"shl.b32 {register}, $1, {places};"
    return f"shr.b32 {register}, $1, {-places};"
