"""What the cache holds of a head: its channels as they are, or codes of them.

Keys and values each have a kind of codes. A kind is what append and attention need to know of it:
how channels become words, and how a tile of words becomes an operand of the tensor cores. Scales
and zeros are linear: attention folds those of tokens into scores and weights, and those of keys'
channels into queries, or, where a tile is used by many queries, all into the operand, as it does
those of values' channels.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from mpjax.kernels import bits as bit_planes
from mpjax.kernels.codes import float8
from mpjax.kernels.kv_cache import quantize
from mpjax.kernels.target import current_target


class KVCodes:
    """Channels as they are, in 16 bits or more; the other kinds refine it.

    bits: of a code. scaling: whose scale there is: each token's, or each channel's over `group`
    tokens, with a zero beside it; one that is given, of the head, or of each of its channels
    ("static"); or none. block: how many tokens wait in 16 bits and are encoded together
    (BitDecoding's residual block), or None where each token is encoded as it comes. hadamard:
    whether what is encoded, and what `decode` gives, is the Hadamard transform of the vectors.
    """

    bits: int = 16
    scaling: Literal["token", "channel", "head", "static"] | None = None
    group: int | None = None
    block: int | None = None
    hadamard: bool = False

    @property
    def is_quantized(self) -> bool:
        """Whether pages hold codes in uint16 words rather than values."""
        return self.bits < 16

    @property
    def has_given_scales(self) -> bool:
        """Whether its scales are no part of what `encode` finds."""
        return self.scaling in ("head", "static")

    @property
    def keeps_scales(self) -> bool:
        """Whether `encode` finds scales and zeros, which pages keep in 16 bits."""
        return self.scaling in ("token", "channel")

    @property
    def planes(self) -> int:
        """Codes in a 16-bit word; plane j holds the j-th slice of the head dimension."""
        return bit_planes.planes_per_word(self.bits)

    def encode(
        self,
        pieces: Sequence[jax.Array],
        scales: Sequence[jax.Array] | None,
        dtype: jax.typing.DTypeLike | None,
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Words, and the parameters if they are made here; also in a kernel.

        pieces: equal slices [..., width] of the head dimension, as many as `planes` or a multiple:
            the words come in len(pieces) / planes slices. Where channels have scales, it is
            [..., group, width], whole groups of tokens.
        scales: for each piece what broadcasts to it, where they are given. dtype: of the scales and
            zeros that are found here, bfloat16 or float16; None where there are none.

        Parameters are one array [..., 1], of tokens, or for each piece one [..., 1, width], of
        channels.
        """
        return list(pieces), []

    def decode(
        self, words: jax.Array, parameters: jax.Array | None, dtype: jax.typing.DTypeLike | None
    ) -> jax.Array:
        """Values [..., head dim] in float32 of words [..., head dim / planes].

        parameters: what broadcasts to the values; dtype: as `encode` took it.
        """
        return words.astype(jnp.float32)

    def operand(
        self, words: jax.Array, plane: int, dtype: jax.typing.DTypeLike, *, copy: int = 0
    ) -> jax.Array:
        """One plane of a tile of words, in a kernel: without scale and zero, and exact.

        Times 2**`exponent`; in the 16-bit dtype. copy: as in `bits.decode_in_place`.
        """
        return words.astype(dtype)

    def exponent(self, plane: int, dtype: jax.typing.DTypeLike) -> int:
        """Of two: what one is worth in a plane's `operand`."""
        return 0

    def offset(self, dtype: jax.typing.DTypeLike) -> float:
        """How much less than a code its `operand` is."""
        return 0

    def sums_apart(self, dtype: jax.typing.DTypeLike) -> bool:
        """Whether tensor cores, which cut off more of a longer sum, should sum one tile at a time.

        They lose too much where what 8-bit codes have in common is nearly all that they sum.
        """
        return self.bits == 8 and self.scaling == "token" and self.offset(dtype) == 0

    def scaled_operand(
        self, words: jax.Array, plane: int, step: jax.Array, zero: jax.Array
    ) -> jax.Array:
        """One plane of a tile of words, in a kernel: code · step + zero, rounded once, in 16 bits.

        Times 2**bits.exponent_scaled. step, zero: parameters as they are kept, in a shape that
        broadcasts to the words.
        """
        zero = zero * jnp.asarray(2.0 ** bit_planes.exponent_scaled(zero.dtype), zero.dtype)
        return bit_planes.decode_scaled(words, plane, self.bits, step, zero)

    def _words(self, codes: list[jax.Array]) -> list[jax.Array]:
        slices = len(codes) // self.planes
        shifted = [code << (i // slices * self.bits) for i, code in enumerate(codes)]
        return [
            functools.reduce(operator.or_, shifted[i::slices]).astype(jnp.uint16)
            for i in range(slices)
        ]


class Integers(KVCodes):
    """Asymmetric, x ≈ code · scale + zero.

    Scale and zero are those of a token and head (TurboMind, BitDecoding's tensor-wise), or of a
    channel over a group of tokens (BitDecoding's channel-wise).
    """

    def __init__(
        self,
        bits: int,
        *,
        group: int | None = None,
        block: int | None = None,
        hadamard: bool = False,
    ):
        self.bits, self.group, self.block, self.hadamard = bits, group, block, hadamard
        self.scaling = "token" if group is None else "channel"

    def encode(
        self,
        pieces: Sequence[jax.Array],
        scales: Sequence[jax.Array] | None,
        dtype: jax.typing.DTypeLike | None,
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Scale = (max − min) / (2**bits − 1) and zero = min, a pair of 16 bits."""
        assert dtype is not None
        values = [piece.astype(jnp.float32) for piece in pieces]
        if self.scaling == "channel":
            ranges = [(x.min(-2)[..., None, :], x.max(-2)[..., None, :]) for x in values]
        else:
            low = functools.reduce(jnp.minimum, values).min(-1)[..., None]
            high = functools.reduce(jnp.maximum, values).max(-1)[..., None]
            ranges = [(low, high)]
        found = [quantize.parameters(*ends, self.bits, dtype) for ends in ranges]
        of_each = found * (len(values) // len(found))
        codes = [
            quantize.encode(x, step, zero, self.bits)
            for x, (step, zero) in zip(values, of_each, strict=True)
        ]
        pairs = [
            bit_planes.pack_pair(step.astype(dtype), zero.astype(dtype)) for step, zero in found
        ]
        return self._words(codes), pairs

    def decode(
        self, words: jax.Array, parameters: jax.Array | None, dtype: jax.typing.DTypeLike | None
    ) -> jax.Array:
        """Code · scale + zero."""
        assert parameters is not None
        assert dtype is not None
        codes = bit_planes.unpack_planes(words, self.bits)
        codes = codes.reshape(*words.shape[:-1], -1).astype(jnp.float32)
        step, zero = bit_planes.unpack_pair(parameters, dtype, dtype)
        return codes * step.astype(jnp.float32) + zero.astype(jnp.float32)

    def operand(
        self, words: jax.Array, plane: int, dtype: jax.typing.DTypeLike, *, copy: int = 0
    ) -> jax.Array:
        """Codes, less their offset."""
        offset = self.offset(dtype)
        return bit_planes.decode_in_place(words, plane, self.bits, dtype, offset=offset, copy=copy)

    def offset(self, dtype: jax.typing.DTypeLike) -> float:
        """The middle of codes, or none: those with scales of channels are summed over channels."""
        return 0 if self.scaling == "channel" else bit_planes.offset(self.bits, dtype)

    def exponent(self, plane: int, dtype: jax.typing.DTypeLike) -> int:
        """That of a subnormal, and of the code's place in its byte."""
        offset = self.offset(dtype)
        return bit_planes.exponent_in_place(plane, self.bits, dtype, offset=offset)


class StaticIntegers(Integers):
    """Symmetric, x ≈ (code − 128) · scale, with a scale that each channel of a head is given.

    LiquidServe's, section 6 of LiquidGEMM: from 8-bit codes without anything for a token.
    """

    def __init__(self) -> None:
        super().__init__(8)
        self.scaling = "static"

    def encode(
        self,
        pieces: Sequence[jax.Array],
        scales: Sequence[jax.Array] | None,
        dtype: jax.typing.DTypeLike | None,
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Codes of x / scale, half rounded up; beyond ±127, to that end."""
        assert scales is not None
        codes = [
            quantize.encode_symmetric(x.astype(jnp.float32), scale, self.bits)
            for x, scale in zip(pieces, scales, strict=True)
        ]
        return self._words(codes), []

    def decode(
        self, words: jax.Array, parameters: jax.Array | None, dtype: jax.typing.DTypeLike | None
    ) -> jax.Array:
        """(Code − 128) · scale."""
        assert parameters is not None
        codes = bit_planes.unpack_planes(words, self.bits).reshape(*words.shape[:-1], -1)
        return (codes.astype(jnp.float32) - 2.0 ** (self.bits - 1)) * parameters

    def operand(
        self, words: jax.Array, plane: int, dtype: jax.typing.DTypeLike, *, copy: int = 0
    ) -> jax.Array:
        """Codes − 128."""
        step, zero = (jnp.asarray(x, dtype) for x in (1.0, -(2.0 ** (self.bits - 1))))
        return self.scaled_operand(words, plane, step, zero)

    def exponent(self, plane: int, dtype: jax.typing.DTypeLike) -> int:
        """That of `decode_scaled`."""
        return bit_planes.exponent_scaled(dtype)

    def offset(self, dtype: jax.typing.DTypeLike) -> float:
        """128."""
        return 2 ** (self.bits - 1)


class Float8(KVCodes):
    """FP8 (e4m3) with a scale that each head is given: x ≈ e4m3(code) · scale."""

    bits = 8
    scaling = "head"

    def encode(
        self,
        pieces: Sequence[jax.Array],
        scales: Sequence[jax.Array] | None,
        dtype: jax.typing.DTypeLike | None,
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Codes of x / scale, rounded to the nearest; beyond e4m3's range, to its end."""
        assert scales is not None

        def code(piece: jax.Array, scale: jax.Array) -> jax.Array:
            x = piece.astype(jnp.float32) * current_target().divide(jnp.ones_like(scale), scale)
            x = jnp.clip(x, -float8.LARGEST, float8.LARGEST).astype(jnp.float8_e4m3fn)
            return jax.lax.bitcast_convert_type(x, jnp.uint8).astype(jnp.int32)

        return self._words([code(*each) for each in zip(pieces, scales, strict=True)]), []

    def decode(
        self, words: jax.Array, parameters: jax.Array | None, dtype: jax.typing.DTypeLike | None
    ) -> jax.Array:
        """e4m3(code) · scale."""
        assert parameters is not None
        codes = bit_planes.unpack_planes(words, self.bits).reshape(*words.shape[:-1], -1)
        values = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
        return values.astype(jnp.float32) * parameters

    def operand(
        self, words: jax.Array, plane: int, dtype: jax.typing.DTypeLike, *, copy: int = 0
    ) -> jax.Array:
        """e4m3(code)."""
        return float8.decode_moved(words, plane, jnp.dtype(dtype))

    def exponent(self, plane: int, dtype: jax.typing.DTypeLike) -> int:
        """That of the formats' biases."""
        return float8.exponent_moved(jnp.dtype(dtype))


BLOCKS = {4: 128, 2: 256}  # tokens of BitDecoding's residual block, by the bits
GROUPS = (128, 64, 32)  # tokens that share a channel's scale; the first goes without saying


def _of_channels(name: str, bits: int) -> dict[str, KVCodes]:
    return {
        f"{name}{f'g{group}' if group != GROUPS[0] else ''}": Integers(
            bits, group=group, block=BLOCKS[bits]
        )
        for group in GROUPS
    }


VALUE_KINDS: dict[str, KVCodes] = {
    "16": KVCodes(),
    "8": Integers(8),
    "8s": StaticIntegers(),
    "4": Integers(4),
    **_of_channels("4c", 4),
    "2": Integers(2, block=BLOCKS[2]),
    "fp8": Float8(),
}
# Keys of two bits need the scales of channels; at four, those of tokens often do, if no channel is
# much larger than others.
KEY_KINDS: dict[str, KVCodes] = {
    **VALUE_KINDS,
    "4": Integers(4, hadamard=True),
    "4t": VALUE_KINDS["4"],
    "2t": VALUE_KINDS["2"],
    **_of_channels("2", 2),
}
