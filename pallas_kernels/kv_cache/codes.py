"""Kinds of codes for keys and values in the cache: 16-bit channels, integers, or FP8.

Keys and values each have a kind. `append` uses it to encode channels to words, and attention to
decode a tile of words to an operand of the tensor cores. Decoding is linear in scales and zeros, so
attention need not apply them to each code: it multiplies scores and softmax weights by scales of
tokens, and queries by scales of key channels. Only scales of value channels, or with many queries
per tile all scales, are applied by decoding itself.
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
    """The kind of keys or values that are stored unquantised; the base class of the other kinds.

    bits: of a code; 16 also stands for unquantised float32.
    scaling: "token" and "channel" for a scale and a zero of each token, or of each channel over
        `group` tokens, which `encode` computes; "head" and "static" for a static scale of each
        head, or of each channel of a head, which the caller passes; None for no scales.
    block: the number of tokens that are kept in 16 bits until they are encoded together
        (BitDecoding's residual block); None if each token is encoded immediately.
    hadamard: whether vectors are transformed before they are encoded, so that `decode` returns
        their Hadamard transform.
    """

    bits: int = 16
    scaling: Literal["token", "channel", "head", "static"] | None = None
    group: int | None = None
    block: int | None = None
    hadamard: bool = False

    @property
    def is_quantized(self) -> bool:
        """Whether pages have codes in uint16 words instead of values."""
        return self.bits < 16

    @property
    def has_given_scales(self) -> bool:
        """Whether scales are static, so that `encode` computes none."""
        return self.scaling in ("head", "static")

    @property
    def keeps_scales(self) -> bool:
        """Whether `encode` computes scales and zeros, which pages keep in 16 bits."""
        return self.scaling in ("token", "channel")

    @property
    def planes(self) -> int:
        """The number of codes in a word; plane j is the j-th slice of the head dimension."""
        return bit_planes.planes_per_word(self.bits)

    def encode(
        self,
        pieces: Sequence[jax.Array],
        scales: Sequence[jax.Array] | None,
        dtype: jax.typing.DTypeLike | None,
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Encodes vectors to words, and computes their parameters; also inside kernels.

        pieces: `planes` equal slices [..., width] of the head dimension, or a multiple of `planes`.
            If channels have scales, slices are [..., group, width], whole groups of tokens.
        scales: static scales of each piece, broadcastable to it; None without static scales.
        dtype: of the scales and zeros that this function computes, bfloat16 or float16; None if it
            computes none.

        Returns len(pieces) / planes slices of words, and a list of parameters, which is empty if
        scales are static. Parameters are pairs of scale and zero in uint32 (`bits.pack_pair`): of
        tokens, one array [..., 1]; of channels, an array [..., 1, width] for each piece.
        """
        return list(pieces), []

    def decode(
        self, words: jax.Array, parameters: jax.Array | None, dtype: jax.typing.DTypeLike | None
    ) -> jax.Array:
        """Decodes words [..., head dim / planes] to float32 values [..., head dim].

        parameters: broadcastable to the values. dtype: as for `encode`.
        """
        return words.astype(jnp.float32)

    def operand(
        self, words: jax.Array, plane: int, dtype: jax.typing.DTypeLike, *, copy: int = 0
    ) -> jax.Array:
        """Decodes one plane to (code − `offset`) · 2**`exponent`, exact, in the 16-bit `dtype`.

        Runs inside a kernel. Scales and zeros are not applied.

        words: a tile. copy: as in `bits.decode_in_place`.
        """
        return words.astype(dtype)

    def exponent(self, plane: int, dtype: jax.typing.DTypeLike) -> int:
        """The exponent of the power of two by which `operand` scales a plane's codes."""
        return 0

    def offset(self, dtype: jax.typing.DTypeLike) -> float:
        """The number that `operand` subtracts from codes."""
        return 0

    def sums_apart(self, dtype: jax.typing.DTypeLike) -> bool:
        """Whether each tile's product should be added to the sum by float32 instructions.

        Tensor cores truncate what they add, and lose more with a larger sum. With 8-bit codes from
        which no offset is subtracted, they lose too much, since all codes share a large common
        part.
        """
        return self.bits == 8 and self.scaling == "token" and self.offset(dtype) == 0

    def scaled_operand(
        self, words: jax.Array, plane: int, step: jax.Array, zero: jax.Array
    ) -> jax.Array:
        """Decodes one plane to (code · step + zero) · 2**`bits.exponent_scaled`, rounded once.

        Runs inside a kernel. step, zero: the stored 16-bit parameters, broadcastable to the words;
        the result has their dtype.
        """
        zero = zero * jnp.asarray(2.0 ** bit_planes.exponent_scaled(zero.dtype), zero.dtype)
        return bit_planes.decode_scaled(words, plane, self.bits, step, zero)

    def _words(self, codes: list[jax.Array]) -> list[jax.Array]:
        """Packs the codes of pieces into slices of uint16 words."""
        slices = len(codes) // self.planes
        shifted = [code << (i // slices * self.bits) for i, code in enumerate(codes)]
        return [
            functools.reduce(operator.or_, shifted[i::slices]).astype(jnp.uint16)
            for i in range(slices)
        ]


class Integers(KVCodes):
    """Asymmetric integer codes, x ≈ code · scale + zero.

    A scale and a zero belong to a token and head (TurboMind; tensor-wise in BitDecoding), or to a
    channel over a group of tokens (channel-wise in BitDecoding).
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
        """Encodes with scale = (max − min) / (2**bits − 1) and zero = min, 16 bits each."""
        assert dtype is not None
        values = [piece.astype(jnp.float32) for piece in pieces]
        if self.scaling == "channel":
            ranges = [(x.min(-2)[..., None, :], x.max(-2)[..., None, :]) for x in values]
        else:
            low = functools.reduce(jnp.minimum, values).min(-1)[..., None]
            high = functools.reduce(jnp.maximum, values).max(-1)[..., None]
            ranges = [(low, high)]
        parameters = [quantize.parameters(*ends, self.bits, dtype) for ends in ranges]
        piece_parameters = parameters * (len(values) // len(parameters))
        codes = [
            quantize.encode(x, step, zero, self.bits)
            for x, (step, zero) in zip(values, piece_parameters, strict=True)
        ]
        pairs = [
            bit_planes.pack_pair(step.astype(dtype), zero.astype(dtype))
            for step, zero in parameters
        ]
        return self._words(codes), pairs

    def decode(
        self, words: jax.Array, parameters: jax.Array | None, dtype: jax.typing.DTypeLike | None
    ) -> jax.Array:
        """Decodes words to code · scale + zero."""
        assert parameters is not None
        assert dtype is not None
        codes = bit_planes.unpack_planes(words, self.bits)
        codes = codes.reshape(*words.shape[:-1], -1).astype(jnp.float32)
        step, zero = bit_planes.unpack_pair(parameters, dtype, dtype)
        return codes * step.astype(jnp.float32) + zero.astype(jnp.float32)

    def operand(
        self, words: jax.Array, plane: int, dtype: jax.typing.DTypeLike, *, copy: int = 0
    ) -> jax.Array:
        """Decodes one plane to (code − `offset`) · 2**`exponent`, in place (`bits`)."""
        offset = self.offset(dtype)
        return bit_planes.decode_in_place(words, plane, self.bits, dtype, offset=offset, copy=copy)

    def offset(self, dtype: jax.typing.DTypeLike) -> float:
        """The number that `operand` subtracts: `bits.offset`, or 0 if channels have scales.

        Products of codes with channel scales are summed over only the channels of a head, and such
        short sums lose little.
        """
        return 0 if self.scaling == "channel" else bit_planes.offset(self.bits, dtype)

    def exponent(self, plane: int, dtype: jax.typing.DTypeLike) -> int:
        """The exponent of the power of two by which `bits.decode_in_place` scales its result."""
        offset = self.offset(dtype)
        return bit_planes.exponent_in_place(plane, self.bits, dtype, offset=offset)


class StaticIntegers(Integers):
    """Symmetric 8-bit codes, x ≈ (code − 128) · scale, with static scales of a head's channels.

    This is LiquidServe's format (LiquidGEMM, section 6), which stores no parameters of tokens.
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
        """Encodes x / scale, rounded to the nearest with halves up, and clipped to ±127."""
        assert scales is not None
        codes = [
            quantize.encode_symmetric(x.astype(jnp.float32), scale, self.bits)
            for x, scale in zip(pieces, scales, strict=True)
        ]
        return self._words(codes), []

    def decode(
        self, words: jax.Array, parameters: jax.Array | None, dtype: jax.typing.DTypeLike | None
    ) -> jax.Array:
        """Decodes words to (code − 128) · scale."""
        assert parameters is not None
        codes = bit_planes.unpack_planes(words, self.bits).reshape(*words.shape[:-1], -1)
        return (codes.astype(jnp.float32) - 2.0 ** (self.bits - 1)) * parameters

    def operand(
        self, words: jax.Array, plane: int, dtype: jax.typing.DTypeLike, *, copy: int = 0
    ) -> jax.Array:
        """Decodes one plane to (code − 128) · 2**`exponent`."""
        step, zero = (jnp.asarray(x, dtype) for x in (1.0, -(2.0 ** (self.bits - 1))))
        return self.scaled_operand(words, plane, step, zero)

    def exponent(self, plane: int, dtype: jax.typing.DTypeLike) -> int:
        """The exponent of the power of two by which `bits.decode_scaled` scales its result."""
        return bit_planes.exponent_scaled(dtype)

    def offset(self, dtype: jax.typing.DTypeLike) -> float:
        """128, the code of zero."""
        return 2 ** (self.bits - 1)


class Float8(KVCodes):
    """FP8 (e4m3) codes, x ≈ e4m3(code) · scale, with static scales of heads."""

    bits = 8
    scaling = "head"

    def encode(
        self,
        pieces: Sequence[jax.Array],
        scales: Sequence[jax.Array] | None,
        dtype: jax.typing.DTypeLike | None,
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Encodes x / scale, rounded to the nearest e4m3 value, and clipped to e4m3's range."""
        assert scales is not None

        def code(piece: jax.Array, scale: jax.Array) -> jax.Array:
            x = piece.astype(jnp.float32) * current_target().divide(jnp.ones_like(scale), scale)
            x = jnp.clip(x, -float8.LARGEST, float8.LARGEST).astype(jnp.float8_e4m3fn)
            return jax.lax.bitcast_convert_type(x, jnp.uint8).astype(jnp.int32)

        return self._words([code(*each) for each in zip(pieces, scales, strict=True)]), []

    def decode(
        self, words: jax.Array, parameters: jax.Array | None, dtype: jax.typing.DTypeLike | None
    ) -> jax.Array:
        """Decodes words to e4m3(code) · scale."""
        assert parameters is not None
        codes = bit_planes.unpack_planes(words, self.bits).reshape(*words.shape[:-1], -1)
        values = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
        return values.astype(jnp.float32) * parameters

    def operand(
        self, words: jax.Array, plane: int, dtype: jax.typing.DTypeLike, *, copy: int = 0
    ) -> jax.Array:
        """Decodes one plane to e4m3(code) · 2**`exponent`."""
        return float8.decode_moved(words, plane, jnp.dtype(dtype))

    def exponent(self, plane: int, dtype: jax.typing.DTypeLike) -> int:
        """The difference of the exponent biases of e4m3 and `dtype`: `float8.exponent_moved`."""
        return float8.exponent_moved(jnp.dtype(dtype))


BLOCKS = {4: 128, 2: 256}  # tokens of BitDecoding's residual block, by the bits of a code
GROUPS = (128, 64, 32)  # tokens that share a channel's scale; names omit the first


def _of_channels(name: str, bits: int) -> dict[str, KVCodes]:
    """Kinds with channel scales, by name, one for each size in GROUPS."""
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
# With two bits, keys need channel scales. With four, scales of tokens usually suffice if no channel
# is much larger than the others, which the Hadamard transform ensures.
KEY_KINDS: dict[str, KVCodes] = {
    **VALUE_KINDS,
    "4": Integers(4, hadamard=True),
    "4t": VALUE_KINDS["4"],
    "2t": VALUE_KINDS["2"],
    **_of_channels("2", 2),
}
