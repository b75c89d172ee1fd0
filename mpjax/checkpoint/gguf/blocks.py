"""The types of GGUF's tensors: plain numbers, and blocks of codes with their scales.

A block is some neighbouring numbers of a row. Source: ggml, src/ggml-common.h and
src/ggml-quants.c. Every product below is exact in float32, so the values are the same bits
everywhere, also where a compiler fuses the product with the sum behind it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from mpjax.errors import CheckpointError

# Types of tensors that other programs write and that are not read, by number.
OTHERS = {
    **{9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 20: "IQ4_NL", 23: "IQ4_XS", 39: "MXFP4"},
    **{16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S"},
    **{24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M"},
    **{34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4"},
}
CodesAndScales = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class TensorType:
    """A type of tensors.

    name, number: as in ggml. size: numbers in a block. block_bytes: bytes of a block.
    dtype: of plain numbers, which are blocks of one; None for codes.
    values: from blocks uint8 [..., block_bytes] to their numbers, float32 [..., size].
    codes: of a type whose numbers are a signed code times a scale: from blocks to the codes int32
        [..., size] and the scales float16 [...]. code_bits: of these codes, sign included.
    """

    name: str
    number: int
    size: int = 1
    block_bytes: int = 2
    dtype: np.dtype | None = None
    values: Callable[[jax.Array], jax.Array] | None = None
    codes: Callable[[jax.Array], CodesAndScales] | None = None
    code_bits: int = 0

    def nbytes(self, shape: tuple[int, ...], where: str) -> int:
        """Bytes of a tensor. Raises CheckpointError where blocks don't divide its rows."""
        columns = shape[-1] if shape else 1
        if columns % self.size:
            raise CheckpointError(
                f"{where} has rows of {columns} numbers: expected a multiple of {self.size}, the "
                f"block of {self.name}"
            )
        return math.prod(shape) // self.size * self.block_bytes

    def dequantize(self, blocks: jax.Array) -> jax.Array:
        """The numbers float32 [rows, columns] of blocks uint8 [rows, blocks, block_bytes]."""
        assert self.values is not None
        return self.values(blocks).reshape(blocks.shape[0], -1)


def of_number(number: int, where: str) -> TensorType:
    """The type of a number. Raises CheckpointError for a type that is not read."""
    if number in TYPES:
        return TYPES[number]
    raise CheckpointError(
        f"{where} has the type {OTHERS.get(number, 'with the number')} ({number}), which is not "
        f"read: take a file of the model in {', '.join(READ)}, or its safetensors checkpoint"
    )


def _float16(blocks: jax.Array, begin: int) -> jax.Array:
    """The float16 at a byte of each block, [...]."""
    return jax.lax.bitcast_convert_type(blocks[..., begin : begin + 2], jnp.float16)


def _float32(blocks: jax.Array, begin: int) -> jax.Array:
    """The float16 at a byte of each block as float32, [..., 1], to broadcast with its numbers."""
    return _float16(blocks, begin)[..., None].astype(jnp.float32)


def _halves(packed: jax.Array) -> jax.Array:
    """Nibbles of bytes [..., n] as codes [..., 2n]: all low ones, then all high ones."""
    return jnp.concatenate([packed & jnp.uint8(15), packed >> jnp.uint8(4)], axis=-1)


def _fifth_bits(blocks: jax.Array, begin: int) -> jax.Array:
    """The fifth bits of 32 codes, as 16 or 0: bit i of four bytes in little-endian order."""
    words = jax.lax.bitcast_convert_type(blocks[..., begin : begin + 4], jnp.uint32)[..., None]
    shifts = jax.lax.broadcast_to_rank(jnp.arange(32, dtype=jnp.uint32), words.ndim)
    return ((words >> shifts) & jnp.uint32(1)).astype(jnp.uint8) << jnp.uint8(4)


def _scaled(codes: Callable[[jax.Array], CodesAndScales]) -> Callable[[jax.Array], jax.Array]:
    """Numbers of a type that has `codes`: code · scale."""

    def values(blocks: jax.Array) -> jax.Array:
        found, scales = codes(blocks)
        return found.astype(jnp.float32) * scales[..., None].astype(jnp.float32)

    return values


def _q8_0(blocks: jax.Array) -> CodesAndScales:
    codes = jax.lax.bitcast_convert_type(blocks[..., 2:], jnp.int8).astype(jnp.int32)
    return codes, _float16(blocks, 0)


def _q4_0(blocks: jax.Array) -> CodesAndScales:
    return _halves(blocks[..., 2:]).astype(jnp.int32) - 8, _float16(blocks, 0)


def _q5_0(blocks: jax.Array) -> CodesAndScales:
    codes = _halves(blocks[..., 6:]) | _fifth_bits(blocks, 2)
    return codes.astype(jnp.int32) - 16, _float16(blocks, 0)


def _q4_1(blocks: jax.Array) -> jax.Array:
    codes = _halves(blocks[..., 4:]).astype(jnp.float32)
    return codes * _float32(blocks, 0) + _float32(blocks, 2)


def _q5_1(blocks: jax.Array) -> jax.Array:
    codes = (_halves(blocks[..., 8:]) | _fifth_bits(blocks, 4)).astype(jnp.float32)
    return codes * _float32(blocks, 0) + _float32(blocks, 2)


def _six_bit_pairs(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Eight scales and eight minima of six bits from 12 bytes, each float32 [..., 8, 1]."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    six, four, two = jnp.uint8(63), jnp.uint8(15), jnp.uint8(6)
    top = jnp.uint8(4)
    scales = [first & six, (third & four) | ((first >> two) << top)]
    minima = [second & six, (third >> top) | ((second >> two) << top)]
    return tuple(  # type: ignore[return-value]
        jnp.concatenate(halves, axis=-1)[..., None].astype(jnp.float32)
        for halves in (scales, minima)
    )


def _with_minima(blocks: jax.Array, codes: jax.Array) -> jax.Array:
    """Numbers of a block of 8 · 32 codes with six-bit scales and minima, [..., 256]."""
    scales, minima = _six_bit_pairs(blocks[..., 4:16])
    steps = _float32(blocks, 0)[..., None] * scales
    offsets = _float32(blocks, 2)[..., None] * minima
    return (steps * codes.astype(jnp.float32) - offsets).reshape(*blocks.shape[:-1], 256)


def _nibbles_of_chunks(packed: jax.Array) -> jax.Array:
    """Codes [..., 8, 32] of 128 bytes: each 32 bytes hold two runs, the low nibbles first."""
    chunks = packed.reshape(*packed.shape[:-1], 4, 32)
    return _halves(chunks).reshape(*packed.shape[:-1], 8, 32)


def _q4_k(blocks: jax.Array) -> jax.Array:
    return _with_minima(blocks, _nibbles_of_chunks(blocks[..., 16:]))


def _q5_k(blocks: jax.Array) -> jax.Array:
    packed = blocks[..., None, 16:48]  # bit i of a byte belongs to run i
    runs = jnp.arange(8, dtype=jnp.uint8)[:, None]
    fifth = (packed >> jax.lax.broadcast_to_rank(runs, packed.ndim)) & jnp.uint8(1)
    return _with_minima(blocks, _nibbles_of_chunks(blocks[..., 48:]) | (fifth << jnp.uint8(4)))


def _q6_k(blocks: jax.Array) -> jax.Array:
    leading = blocks.shape[:-1]
    low = blocks[..., :128].reshape(*leading, 2, 2, 32)  # of each half: 64 bytes of low nibbles
    high = blocks[..., 128:192].reshape(*leading, 2, 1, 32)  # and 32 bytes of upper two bits
    nibbles = jnp.concatenate([low & jnp.uint8(15), low >> jnp.uint8(4)], axis=-2)
    shifts = jax.lax.broadcast_to_rank(jnp.arange(0, 8, 2, dtype=jnp.uint8)[:, None], high.ndim)
    codes = nibbles | (((high >> shifts) & jnp.uint8(3)) << jnp.uint8(4))
    centred = codes.astype(jnp.float32).reshape(*leading, 16, 16) - 32
    scales = jax.lax.bitcast_convert_type(blocks[..., 192:208], jnp.int8).astype(jnp.float32)
    steps = _float32(blocks, 208) * scales
    return (steps[..., None] * centred).reshape(*leading, 256)


TYPES: dict[int, TensorType] = {
    each.number: each
    for each in (
        TensorType("F32", 0, 1, 4, np.dtype(np.float32)),
        TensorType("F16", 1, 1, 2, np.dtype(np.float16)),
        TensorType("BF16", 30, 1, 2, np.dtype(ml_dtypes.bfloat16)),
        TensorType("Q4_0", 2, 32, 18, None, _scaled(_q4_0), _q4_0, 4),
        TensorType("Q4_1", 3, 32, 20, None, _q4_1),
        TensorType("Q5_0", 6, 32, 22, None, _scaled(_q5_0), _q5_0, 5),
        TensorType("Q5_1", 7, 32, 24, None, _q5_1),
        TensorType("Q8_0", 8, 32, 34, None, _scaled(_q8_0), _q8_0, 8),
        TensorType("Q4_K", 12, 256, 144, None, _q4_k),
        TensorType("Q5_K", 13, 256, 176, None, _q5_k),
        TensorType("Q6_K", 14, 256, 210, None, _q6_k),
    )
}
READ = tuple(each.name for each in TYPES.values())
BLOCK_TYPES = {each.name: each for each in TYPES.values() if each.dtype is None}
