"""LiquidQuant: four-bit codes that become int8 with one multiply-add and one XOR (LiquidGEMM §4).

There are two levels. Per output channel, weights become int8 in −119 … 119. Per 64 input channels,
these become four bits: u = q − min(q) in 0 … 238, step s = round(max(u) / 15), code = round(u / s).
Then q ≈ code·s + min(q), which in bytes is (code·s + a) XOR 0x80 with a = 128 + min(q): no product
or sum for an actual code exceeds 255, so four bytes fit one 32-bit multiply-add, and no carry
crosses them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from mpjax.kernels.bits import pack_pair, unpack_pair
from mpjax.kernels.checks import is_known
from mpjax.kernels.codes.base import (
    CodeKind,
    Decoder,
    Group,
    Parameters,
    Spelling,
    divisible,
    require_range,
)
from mpjax.kernels.target import current_target

if TYPE_CHECKING:
    from mpjax.kernels.formats import WeightFormat
    from mpjax.kernels.plain_codes import PlainCodes

PROTECTED = 119  # the range of the first level that keeps the second from overflowing
TOP = 15


class Liquid(CodeKind):
    """W = (code · step + offset − 128) · channel scale; the term in brackets is an int8."""

    bits = 4
    group_sizes = (64,)
    operands = ("int8",)
    spellings = (Spelling("4", "8", 64),)
    groups_of_word = 2
    scale_dtypes = ("uint16",)
    has_zeros = True
    has_channel_scales = True
    has_group_scales = False
    why_scales_are_fixed = "has integer steps: replace its channel_scales instead"

    def fit(
        self, groups: jax.Array, format: WeightFormat, table: jax.Array | None = None
    ) -> Parameters:
        """Channel scales of the first level; steps and offsets of the second.

        The paper doesn't specify the rounding of the step. If it is rounded to nearest, at least 1,
        and codes are clamped to 15, no pair (min, max) overflows a byte, and the error is smaller
        than with a step that is rounded up.
        """
        channel_scales = divisible(jnp.abs(groups).max((0, 1)) * (1 / PROTECTED))
        first = _round_first(groups, channel_scales[None, None])
        low = first.min(1)
        steps = jnp.maximum(1, (2 * (first.max(1) - low) + TOP) // (2 * TOP))
        offsets = (low + 128).astype(jnp.uint16)
        return Parameters(steps.astype(jnp.uint16), offsets, channel_scales)

    def nearest(self, values: jax.Array, parameters: Parameters) -> jax.Array:
        """Rounds at both levels; at the second, ties are rounded up."""
        assert parameters.channel_scales is not None
        assert parameters.zeros is not None
        first = _round_first(values, parameters.channel_scales)
        steps = parameters.scales.astype(jnp.int32)
        shifted = first - (parameters.zeros.astype(jnp.int32) - 128)
        codes = (2 * shifted + steps) // (2 * steps)
        return jnp.clip(codes, 0, TOP).astype(jnp.uint8)

    def decode(self, codes: jax.Array, parameters: Parameters) -> jax.Array:
        """The int8 of the first level times the channel's scale."""
        assert parameters.channel_scales is not None
        return self.first_level(codes, parameters).astype(jnp.float32) * parameters.channel_scales

    def require_values(self, plain: PlainCodes) -> None:
        """As in CodeKind; codes, steps, offsets and code · step + offset must be in range."""
        assert plain.zeros is not None
        for name, array, most in (
            ("codes", plain.codes, TOP),
            ("zeros", plain.zeros, 255),
            ("scales", plain.scales, 255),
        ):
            require_range(name, array, most)
        _require_bytes(plain.codes, plain.scales, plain.zeros)

    def first_level(self, codes: jax.Array, parameters: Parameters) -> jax.Array:
        """The int8 of the first level, which the kernel multiplies."""
        assert parameters.zeros is not None
        steps, offsets = (a.astype(jnp.uint8) for a in (parameters.scales, parameters.zeros))
        values = (codes.astype(jnp.uint8) * steps + offsets) ^ jnp.uint8(0x80)
        return jax.lax.bitcast_convert_type(values, jnp.int8)

    def pack(self, planes: jax.Array) -> jax.Array:
        """Packs plane 0 to the low nibble of a byte, and plane 1 to the high nibble."""
        return (planes[..., 0, :] | (planes[..., 1, :] << jnp.uint8(4)))[..., None, :]

    def unpack(self, words: jax.Array) -> jax.Array:
        """The inverse of `pack`."""
        words = words[..., 0, :]
        return jnp.stack([words & jnp.uint8(0xF), words >> jnp.uint8(4)], -2)

    def pack_parameters(self, scales: jax.Array, zeros: jax.Array) -> jax.Array:
        """Packs the steps and offsets of two groups to a word, one byte each.

        From the lowest byte: step and offset of one group, step and offset of the next.
        """
        halves = scales | (zeros << jnp.uint16(8))
        return pack_pair(halves[..., 0::2, :], halves[..., 1::2, :])

    def unpack_parameters(self, words: jax.Array, scale_dtype: str) -> tuple[jax.Array, jax.Array]:
        """The inverse of `pack_parameters`."""
        halves = jnp.stack(unpack_pair(words, scale_dtype, scale_dtype), -2)
        halves = halves.reshape(*words.shape[:-2], -1, words.shape[-1])
        return halves & jnp.uint16(0xFF), halves >> jnp.uint16(8)

    def load(
        self, parameters: jax.Array, scale_dtype: str, operand: jnp.dtype, width: int
    ) -> Group:
        """The words of parameters, unchanged.

        Plane i of a block is group i of a word: decoding extracts the group's bytes from the word.
        """
        return Group(None, (parameters,))

    def decoder(
        self,
        columns: list[jax.Array],
        arguments: tuple[jax.Array, ...],
        shared: tuple[jax.Array, ...],
        operand: jnp.dtype,
    ) -> Decoder:
        """Decodes to the int8 of the first level, with seven instructions for eight weights."""
        [words], [parameters] = columns, arguments
        target = current_target()
        if target.has_ptx:
            registers = target.register_column(parameters, words.shape)
            return lambda plane: _decode_with_ptx(words, plane, registers)
        return lambda plane: _decode(words, plane, parameters)


def _round_first(values: jax.Array, channel_scales: jax.Array) -> jax.Array:
    """The first level's integers, as int32."""
    rounded = jnp.round(values / channel_scales)
    return jnp.clip(rounded, -PROTECTED, PROTECTED).astype(jnp.int32)


def _decode(words: jax.Array, plane: int, parameters: jax.Array) -> jax.Array:
    """Decodes one nibble of each uint8 word to (code · step + offset) XOR 0x80, as int8."""
    step, offset = (
        jnp.broadcast_to(byte.astype(jnp.uint8)[:, None], words.shape)
        for byte in (
            parameters >> jnp.uint32(16 * plane),
            parameters >> jnp.uint32(16 * plane + 8),
        )
    )
    codes = (words >> jnp.uint8(4 * plane)) & jnp.uint8(0xF)
    values = (codes * step + offset) ^ jnp.uint8(0x80)
    return jax.lax.bitcast_convert_type(values, jnp.int8)


def _decode_with_ptx(words: jax.Array, plane: int, parameters: jax.Array) -> jax.Array:
    # A register has four bytes of one output channel, so that one step serves all four.
    assembly = f"""{{
        .reg .b32 codes, step, offset;
        shr.b32 codes, $1, {4 * plane};
        and.b32 codes, codes, 0x0F0F0F0F;
        prmt.b32 step, $2, 0, 0x444{2 * plane};
        prmt.b32 offset, $2, 0, 0x{4 * str(2 * plane + 1)};
        mad.lo.u32 codes, codes, step, offset;
        xor.b32 $0, codes, 0x80808080;
    }}"""
    return current_target().inline_ptx(assembly, words, parameters, dtype=jnp.int8)


def _require_bytes(codes: jax.Array, steps: jax.Array, offsets: jax.Array) -> None:
    if not is_known((codes, steps, offsets)):
        return
    with jax.ensure_compile_time_eval():
        groups = (*codes.shape[:-2], steps.shape[-2], -1, codes.shape[-1])
        peaks = jnp.asarray(codes).reshape(groups).max(-2)
        peaks, steps, offsets = (jnp.asarray(x).astype(jnp.int32) for x in (peaks, steps, offsets))
        largest = int((peaks * steps + offsets).max())
    if largest > 255:  # it would carry into the byte of another code
        raise ValueError(
            f"code · step + offset is up to {largest}; expected at most 255, a byte: choose "
            "smaller steps or offsets"
        )
