"""GGUF's tensor types: plain numbers, and blocks of codes with scales.

A block holds neighbouring values of a row. Source: ggml, src/ggml-common.h and src/ggml-quants.c.
Every product below is exact in float32, so results are bitwise equal everywhere, also if a compiler
uses fused multiply-add.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from mpjax.checkpoint.gguf import grids
from mpjax.errors import CheckpointError
from mpjax.kernels.codes import float4

# Unsupported tensor types, by number.
OTHERS = {
    **{9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
    40: "NVFP4",
}
GROUP = 32  # codes that share a scale, in most types with `codes`


class Codes(NamedTuple):
    """Blocks with the values code · scale, code · scale + minimum, or table[code] · scale.

    codes: int32 [..., groups, size of a group]; without minima and table they are signed. scales,
    minima: float32 [..., groups, 1]; minima may be None.
    """

    codes: jax.Array
    scales: jax.Array
    minima: jax.Array | None = None

    def values(self, table: tuple[float, ...] | None = None) -> jax.Array:
        """The dequantised values, float32 [..., groups, size of a group]."""
        codes = self.codes if table is None else jnp.asarray(table, jnp.float32)[self.codes]
        numbers = codes.astype(jnp.float32) * self.scales
        return numbers if self.minima is None else numbers + self.minima


@dataclasses.dataclass(frozen=True)
class TensorType:
    """A GGUF tensor type.

    name, number: as in ggml. size: values in a block. block_bytes: bytes of a block.
    dtype: of plain numbers, whose blocks have one value; None for codes.
    values: converts blocks uint8 [..., block_bytes] to values float32 [..., size].
    codes: converts blocks to Codes, for types with a scale for every `group` values, of which 32 or
        more have one. code_bits: bits of these codes, including the sign. has_minima: whether
        groups have minima. table: the values that codes index, or None.
    """

    name: str
    number: int
    size: int = 1
    block_bytes: int = 2
    dtype: np.dtype | None = None
    values: Callable[[jax.Array], jax.Array] | None = None
    codes: Callable[[jax.Array], Codes] | None = None
    code_bits: int = 0
    has_minima: bool = False
    group: int = GROUP
    table: tuple[float, ...] | None = None

    def nbytes(self, shape: tuple[int, ...], where: str) -> int:
        """Bytes of a tensor. Raises CheckpointError if its rows aren't whole blocks."""
        columns = shape[-1] if shape else 1
        if columns % self.size:
            raise CheckpointError(
                f"{where} has rows of {columns} numbers: expected a multiple of {self.size}, the "
                f"block of {self.name}"
            )
        return math.prod(shape) // self.size * self.block_bytes

    def dequantize(self, blocks: jax.Array) -> jax.Array:
        """The values float32 [rows, columns] of blocks uint8 [rows, blocks, block_bytes]."""
        if self.codes is not None:
            return self.codes(blocks).values(self.table).reshape(blocks.shape[0], -1)
        assert self.values is not None
        return self.values(blocks).reshape(blocks.shape[0], -1)


def of_number(number: int, where: str) -> TensorType:
    """The tensor type with a number. Raises CheckpointError for an unsupported type."""
    if number in TYPES:
        return TYPES[number]
    raise CheckpointError(
        f"{where} has the type {OTHERS.get(number, 'with the number')} ({number}), which is not "
        f"read: take a file of the model in {', '.join(READ)}, or its safetensors checkpoint"
    )


def _float32(blocks: jax.Array, begin: int) -> jax.Array:
    """The float16 at byte `begin` of each block, as float32 [..., 1, 1]."""
    half = jax.lax.bitcast_convert_type(blocks[..., begin : begin + 2], jnp.float16)
    return half[..., None, None].astype(jnp.float32)


def _group(codes: jax.Array) -> jax.Array:
    """Codes [..., 32] as int32 with one group per block, [..., 1, 32]."""
    return codes[..., None, :].astype(jnp.int32)


def _halves(packed: jax.Array) -> jax.Array:
    """Unpacks bytes [..., n] to 4-bit codes [..., 2n]: all low nibbles, then all high ones."""
    return jnp.concatenate([packed & jnp.uint8(15), packed >> jnp.uint8(4)], axis=-1)


def _fifth_bits(blocks: jax.Array, begin: int) -> jax.Array:
    """The fifth bits of 32 codes, as 16 or 0: bit i of the uint32 at byte `begin`."""
    words = jax.lax.bitcast_convert_type(blocks[..., begin : begin + 4], jnp.uint32)[..., None]
    shifts = jax.lax.broadcast_to_rank(jnp.arange(32, dtype=jnp.uint32), words.ndim)
    return ((words >> shifts) & jnp.uint32(1)).astype(jnp.uint8) << jnp.uint8(4)


def _q8_0(blocks: jax.Array) -> Codes:
    codes = jax.lax.bitcast_convert_type(blocks[..., 2:], jnp.int8)
    return Codes(_group(codes), _float32(blocks, 0))


def _q4_0(blocks: jax.Array) -> Codes:
    return Codes(_group(_halves(blocks[..., 2:])) - 8, _float32(blocks, 0))


def _q5_0(blocks: jax.Array) -> Codes:
    codes = _halves(blocks[..., 6:]) | _fifth_bits(blocks, 2)
    return Codes(_group(codes) - 16, _float32(blocks, 0))


def _q4_1(blocks: jax.Array) -> Codes:
    codes = _halves(blocks[..., 4:])
    return Codes(_group(codes), _float32(blocks, 0), _float32(blocks, 2))


def _q5_1(blocks: jax.Array) -> Codes:
    codes = _halves(blocks[..., 8:]) | _fifth_bits(blocks, 4)
    return Codes(_group(codes), _float32(blocks, 0), _float32(blocks, 2))


def _six_bit_pairs(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Unpacks 12 bytes to eight 6-bit scales and eight 6-bit minima, float32 [..., 8, 1] each."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    six, four, two = jnp.uint8(63), jnp.uint8(15), jnp.uint8(6)
    top = jnp.uint8(4)
    scales = [first & six, (third & four) | ((first >> two) << top)]
    minima = [second & six, (third >> top) | ((second >> two) << top)]
    return tuple(  # type: ignore[return-value]
        jnp.concatenate(halves, axis=-1)[..., None].astype(jnp.float32)
        for halves in (scales, minima)
    )


def _with_minima(blocks: jax.Array, codes: jax.Array) -> Codes:
    """Codes [..., 8, 32] with their 6-bit scales and (subtracted) minima."""
    scales, minima = _six_bit_pairs(blocks[..., 4:16])
    steps, offsets = _float32(blocks, 0) * scales, _float32(blocks, 2) * minima
    return Codes(codes.astype(jnp.int32), steps, -offsets)


def _nibbles_of_chunks(packed: jax.Array) -> jax.Array:
    """4-bit codes [..., 8, 32] of 128 bytes: each 32 bytes hold two groups, low nibbles first."""
    chunks = packed.reshape(*packed.shape[:-1], 4, 32)
    return _halves(chunks).reshape(*packed.shape[:-1], 8, 32)


def _q4_k(blocks: jax.Array) -> Codes:
    return _with_minima(blocks, _nibbles_of_chunks(blocks[..., 16:]))


def _q5_k(blocks: jax.Array) -> Codes:
    packed = blocks[..., None, 16:48]  # bit i of a byte belongs to run i
    runs = jnp.arange(8, dtype=jnp.uint8)[:, None]
    fifth = (packed >> jax.lax.broadcast_to_rank(runs, packed.ndim)) & jnp.uint8(1)
    return _with_minima(blocks, _nibbles_of_chunks(blocks[..., 48:]) | (fifth << jnp.uint8(4)))


def _q6_k(blocks: jax.Array) -> jax.Array:
    leading = blocks.shape[:-1]
    low = blocks[..., :128].reshape(*leading, 2, 2, 32)  # each half: 64 bytes of low nibbles
    high = blocks[..., 128:192].reshape(*leading, 2, 1, 32)  # and 32 bytes of high bit pairs
    nibbles = jnp.concatenate([low & jnp.uint8(15), low >> jnp.uint8(4)], axis=-2)
    shifts = jax.lax.broadcast_to_rank(jnp.arange(0, 8, 2, dtype=jnp.uint8)[:, None], high.ndim)
    codes = nibbles | (((high >> shifts) & jnp.uint8(3)) << jnp.uint8(4))
    centred = codes.astype(jnp.float32).reshape(*leading, 16, 16) - 32
    scales = jax.lax.bitcast_convert_type(blocks[..., 192:208], jnp.int8).astype(jnp.float32)
    steps = _float32(blocks, 208)[..., 0] * scales
    return (steps[..., None] * centred).reshape(*leading, 256)


def _pairs_of_bits(packed: jax.Array) -> jax.Array:
    """2-bit codes [..., 16, 16] of 64 bytes: in each half, the lowest bits first."""
    chunks = packed.reshape(*packed.shape[:-1], 2, 1, 32)
    shifts = jax.lax.broadcast_to_rank(jnp.arange(0, 8, 2, dtype=jnp.uint8)[:, None], chunks.ndim)
    return ((chunks >> shifts) & jnp.uint8(3)).reshape(*packed.shape[:-1], 16, 16)


def _q2_k(blocks: jax.Array) -> jax.Array:
    codes = _pairs_of_bits(blocks[..., 16:80]).astype(jnp.float32)
    both, top = blocks[..., :16, None], jnp.uint8(4)
    steps = _float32(blocks, 80) * (both & jnp.uint8(15)).astype(jnp.float32)
    minima = _float32(blocks, 82) * (both >> top).astype(jnp.float32)
    return (steps * codes - minima).reshape(*blocks.shape[:-1], 256)


def _q3_k(blocks: jax.Array) -> jax.Array:
    leading = blocks.shape[:-1]
    masks = blocks[..., None, :32]  # bit i of a byte is of group i of 32; 0: subtract 4
    runs = jax.lax.broadcast_to_rank(jnp.arange(8, dtype=jnp.uint8)[:, None], masks.ndim)
    highs = ((masks >> runs) & jnp.uint8(1)).reshape(*leading, 16, 16)
    codes = _pairs_of_bits(blocks[..., 32:96]).astype(jnp.int32) + 4 * highs.astype(jnp.int32) - 4
    lows = _halves(blocks[..., 96:104])
    packed = blocks[..., None, 104:108]
    shifts = jax.lax.broadcast_to_rank(jnp.arange(0, 8, 2, dtype=jnp.uint8)[:, None], packed.ndim)
    tops = ((packed >> shifts) & jnp.uint8(3)).reshape(*leading, 16)
    scales = (lows | (tops << jnp.uint8(4))).astype(jnp.float32)[..., None] - 32
    return (_float32(blocks, 108) * scales * codes.astype(jnp.float32)).reshape(*leading, 256)


# The values of the 4-bit codes of IQ4_NL and IQ4_XS.
NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _iq4_nl(blocks: jax.Array) -> Codes:
    return Codes(_group(_halves(blocks[..., 2:])), _float32(blocks, 0))


def _iq4_xs(blocks: jax.Array) -> Codes:
    leading = blocks.shape[:-1]
    words = jax.lax.bitcast_convert_type(blocks[..., 2:4], jnp.uint16)[..., None]
    shifts = jax.lax.broadcast_to_rank(jnp.arange(0, 16, 2, dtype=jnp.uint16), words.ndim)
    tops = ((words >> shifts) & jnp.uint16(3)).astype(jnp.int32) * 16
    pairs = blocks[..., 4:8, None]
    lows = jnp.concatenate([pairs & jnp.uint8(15), pairs >> jnp.uint8(4)], axis=-1)
    scales = (lows.reshape(*leading, 8).astype(jnp.int32) + tops - 32).astype(jnp.float32)
    codes = _halves(blocks[..., 8:].reshape(*leading, 8, 16)).astype(jnp.int32)
    return Codes(codes, _float32(blocks, 0) * scales[..., None])


# The values of MXFP4's codes, of which 8 is 0 as in ggml, and not −0.
E2M1 = tuple(value + 0.0 for value in float4.E2M1)


def _mxfp4(blocks: jax.Array) -> Codes:
    scales = float4.scales_of(blocks[..., 0]).astype(jnp.float32)
    return Codes(_group(_halves(blocks[..., 1:])), scales[..., None, None])


Points = Callable[[jax.Array], tuple[jax.Array, jax.Array]]  # see grids.py


def _of_grid(
    name: str, number: int, block_bytes: int, decode: Points, bits: int, table: tuple[float, ...]
) -> TensorType:
    """A type with 256 values in a block, which are grid points or ternary digits."""
    has_halves = name in ("IQ2_XS", "IQ2_S", "IQ1_M")  # with a scale for 16 values

    def codes(blocks: jax.Array) -> Codes:
        found, scales = decode(blocks)
        groups = scales.shape[-1]
        return Codes(found.reshape(*found.shape[:-1], groups, -1), scales[..., None])

    common = (name, number, 256, block_bytes)
    if has_halves:
        return TensorType(*common, values=lambda blocks: _whole(codes(blocks).values(table)))
    group = 256 if bits == 2 else GROUP
    return TensorType(*common, codes=codes, code_bits=bits, group=group, table=table)


def _whole(groups: jax.Array) -> jax.Array:
    """Joins the groups of each block: [..., groups, size] to [..., groups · size]."""
    return groups.reshape(*groups.shape[:-2], -1)


TYPES: dict[int, TensorType] = {
    each.number: each
    for each in (
        TensorType("F32", 0, 1, 4, np.dtype(np.float32)),
        TensorType("F16", 1, 1, 2, np.dtype(np.float16)),
        TensorType("BF16", 30, 1, 2, np.dtype(ml_dtypes.bfloat16)),
        TensorType("Q4_0", 2, 32, 18, codes=_q4_0, code_bits=4),
        TensorType("Q4_1", 3, 32, 20, codes=_q4_1, code_bits=4, has_minima=True),
        TensorType("Q5_0", 6, 32, 22, codes=_q5_0, code_bits=5),
        TensorType("Q5_1", 7, 32, 24, codes=_q5_1, code_bits=5, has_minima=True),
        TensorType("Q8_0", 8, 32, 34, codes=_q8_0, code_bits=8),
        TensorType("Q4_K", 12, 256, 144, codes=_q4_k, code_bits=4, has_minima=True),
        TensorType("Q5_K", 13, 256, 176, codes=_q5_k, code_bits=5, has_minima=True),
        TensorType("Q6_K", 14, 256, 210, values=_q6_k),
        TensorType("Q2_K", 10, 256, 84, values=_q2_k),
        TensorType("Q3_K", 11, 256, 110, values=_q3_k),
        TensorType("IQ4_NL", 20, 32, 18, codes=_iq4_nl, code_bits=4, table=NONLINEAR),
        TensorType("IQ4_XS", 23, 256, 136, codes=_iq4_xs, code_bits=4, table=NONLINEAR),
        TensorType("MXFP4", 39, 32, 17, codes=_mxfp4, code_bits=4, table=E2M1),
        _of_grid("IQ1_S", 19, 50, grids.iq1_s, 3, grids.IQ1_TABLE),
        _of_grid("IQ1_M", 29, 56, grids.iq1_m, 3, grids.IQ1_TABLE),
        _of_grid("IQ2_XXS", 16, 66, grids.iq2_xxs, 3, grids.IQ2_TABLE),
        _of_grid("IQ2_XS", 17, 74, grids.iq2_xs, 3, grids.IQ2_TABLE),
        _of_grid("IQ2_S", 22, 82, grids.iq2_s, 3, grids.IQ2_TABLE),
        _of_grid("IQ3_XXS", 18, 98, grids.iq3_xxs, 4, grids.IQ3_XXS_TABLE),
        _of_grid("IQ3_S", 21, 110, grids.iq3_s, 4, grids.IQ3_S_TABLE),
        _of_grid("TQ1_0", 34, 54, grids.tq1_0, 2, grids.TERNARY_TABLE),
        _of_grid("TQ2_0", 35, 66, grids.tq2_0, 2, grids.TERNARY_TABLE),
    )
}
READ = tuple(each.name for each in TYPES.values())
BLOCK_TYPES = {each.name: each for each in TYPES.values() if each.dtype is None}
