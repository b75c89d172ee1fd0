"""FP8 (e4m3) codes: for 16-bit activations, or as the operand of an FP8 product."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from mpjax.kernels.codes.base import (
    CodeKind,
    Decoder,
    Group,
    Parameters,
    Spelling,
    divisible,
)
from mpjax.kernels.rounding import narrow
from mpjax.kernels.target import current_target

if TYPE_CHECKING:
    from mpjax.kernels.formats import WeightFormat

LARGEST = 448.0  # of e4m3, which has no infinities
GROUP = 128  # input channels that share a scale, unless a whole output channel does


def to_float8(x: jax.Array) -> jax.Array:
    """Rounds float32 x to the nearest float8_e4m3fn; larger magnitudes are clamped."""
    return narrow(jnp.clip(x, -LARGEST, LARGEST), jnp.float8_e4m3fn)


class Float8(CodeKind):
    """W = e4m3(code) · scale, one scale per output channel or per 128 of its input channels.

    The last group of input channels may be shorter.
    """

    bits = 8
    group_sizes = (GROUP, None)
    operands = (None, "float8")
    spellings = (Spelling("FP8", "16", GROUP), Spelling("FP8", "FP8", None))
    may_cut_groups = True
    code_dtype = jnp.dtype(jnp.float8_e4m3fn)
    scale_dtypes = ("float32",)

    def fit(
        self, groups: jax.Array, format: WeightFormat, table: jax.Array | None = None
    ) -> Parameters:
        """Scale = max|w| / 448 over a channel, or over a block of 128 × 128 (DeepSeek-V3)."""
        peak = jnp.abs(groups).max(1)  # [groups, N]
        if format.group_size is not None:
            outputs = peak.shape[1]
            tiles = jnp.pad(peak, ((0, 0), (0, -outputs % format.group_size)))
            tiles = tiles.reshape(len(peak), -1, format.group_size).max(2, keepdims=True)
            peak = jnp.broadcast_to(tiles, (*tiles.shape[:2], format.group_size))
            peak = peak.reshape(len(groups), -1)[:, :outputs]
        return Parameters(divisible(peak * (1 / LARGEST)))

    def nearest(self, values: jax.Array, parameters: Parameters) -> jax.Array:
        """The e4m3 nearest to value / scale."""
        return to_float8(values / parameters.scales)

    def decode(self, codes: jax.Array, parameters: Parameters) -> jax.Array:
        """e4m3(code) · scale."""
        return codes.astype(jnp.float32) * parameters.scales

    def load(
        self, parameters: jax.Array, scale_dtype: str, operand: jnp.dtype, width: int
    ) -> Group:
        """The scale, and a part of the parameters that decoding doesn't use (see Group)."""
        column = current_target().column
        scale = column(jax.lax.bitcast_convert_type(parameters, jnp.float32), width)
        return Group(scale, (column(parameters.astype(jnp.int16), width),))

    def decoder(
        self,
        columns: list[jax.Array],
        arguments: tuple[jax.Array, ...],
        shared: tuple[jax.Array, ...],
        operand: jnp.dtype,
    ) -> Decoder:
        """Decodes e4m3 exactly to 16 bits; for FP8 activations, the words are the operand."""
        [words], [carried] = columns, arguments
        if operand == jnp.float8_e4m3fn:
            return lambda plane: words
        return lambda plane: decode_plane(words, plane, operand, carried)


def decode_plane(words: jax.Array, plane: int, operand: jnp.dtype, carried: jax.Array) -> jax.Array:
    """Decodes one byte of each uint16 word, an e4m3 number, to bfloat16 or float16.

    The result is exact for all numbers but NaN. Exponent and mantissa are moved to the mantissa and
    the low bits of the exponent of the wider type. One product then corrects the exponent bias, and
    normalises e4m3's subnormals.

    plane: 0 for the low byte, 1 for the high byte.
    carried: unused; see Group.arguments.
    """
    target = current_target()
    if not target.has_ptx:
        # Both operands are decoded via float16. In bfloat16, e4m3's subnormals would become
        # subnormals of float32, which XLA flushes to zero on a CPU.
        high = words if plane else words << jnp.uint16(8)
        moved = (high & jnp.uint16(0x8000)) | ((high & jnp.uint16(0x7F00)) >> jnp.uint16(1))
        tiny = jax.lax.bitcast_convert_type(moved, jnp.float16)
        return (tiny.astype(jnp.float32) * 2.0**8).astype(operand)
    factor, suffix = (0x7B80, "bf16x2") if operand == jnp.bfloat16 else (0x5C00, "f16x2")
    assembly = f"""{{
        .reg .b32 high, low, factor, zero;
        mov.b32 factor, 0x{factor:04X}{factor:04X};
        mov.b32 zero, 0x80008000;{_move(plane, operand)}
        fma.rn.{suffix} $0, high, factor, zero;
    }}"""
    carried = jnp.broadcast_to(carried, words.shape)
    return target.inline_ptx(assembly, words, carried, dtype=operand)


def decode_moved(words: jax.Array, plane: int, operand: jnp.dtype) -> jax.Array:
    """`decode_plane` without the correction of the exponent bias: times 2**`exponent_moved`."""
    target = current_target()
    if not target.has_ptx:
        return decode_plane(words, plane, operand, words)
    assembly = f"""{{
        .reg .b32 high, low;{_move(plane, operand)}
        mov.b32 $0, high;
    }}"""
    return target.inline_ptx(assembly, words, dtype=operand)


def exponent_moved(operand: jnp.dtype) -> int:
    """The exponent of the power of two by which `decode_moved` scales numbers.

    With PTX it is the exponent bias of e4m3 minus the operand's, and without PTX 0.
    """
    if not current_target().has_ptx:
        return 0
    return -120 if operand == jnp.bfloat16 else -8


def _move(plane: int, operand: jnp.dtype) -> str:
    """PTX that sets `high` to the bytes of a plane as 16-bit floats with e4m3's exponent bias."""
    shift = 4 if operand == jnp.bfloat16 else 1
    mask = 0x7F00 >> shift
    return f"""
        shl.b32 high, $1, {0 if plane else 8};
        shr.b32 low, high, {shift};
        and.b32 low, low, 0x{mask:04X}{mask:04X};
        lop3.b32 high, high, 0x80008000, low, 0xEA;"""
