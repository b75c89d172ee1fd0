"""Codes that index a table of two, three or four bits: normal float, or any table (FLUTE §3).

Words have codes in nibbles. Two neighbouring words, e and e + 1, form a 32-bit register of eight
nibbles. For planes p to p + 3, a quad, nibble n is the code of lane e + n % 2 in plane p + n // 2.
Two-bit codes share nibbles: the next quad is in the upper halves of the nibbles. Three-bit codes
have sixteen planes in three words. The first three quads fill the nibbles of the three words except
for the top bits; the top bits of word i are bit i of the codes of the fourth quad. There are no
padding bits.
"""

from __future__ import annotations

import functools
import statistics
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels.codes.base import (
    GROUP_SIZES,
    CodeKind,
    Decoder,
    Group,
    Parameters,
    Spelling,
)
from mpjax.kernels.codes.look_up import InBoth, InRegisters, InSharedMemory, InSharedRows, LookUp
from mpjax.kernels.rounding import round_to
from mpjax.kernels.target import current_target

if TYPE_CHECKING:
    from mpjax.kernels.formats import WeightFormat

# The outermost quantiles of a normal distribution that a table represents (QLoRA).
_TAIL = (1 / 32 + 1 / 30) / 2


@functools.cache
def normal_float(bits: int) -> np.ndarray:
    """The normal-float table float32 [2**bits], from −1 to 1 with an exact zero (QLoRA, FLUTE §4).

    Quantiles of a normal distribution, one more above zero than below, divided by the largest.
    """
    count = 2 ** (bits - 1)
    quantile = statistics.NormalDist().inv_cdf
    below = [-quantile(p) for p in np.linspace(1 - _TAIL, 0.5, count)]
    above = [quantile(p) for p in np.linspace(0.5, 1 - _TAIL, count + 1)[1:]]
    return np.array([*below, *above], np.float32) / np.float32(above[-1]) + np.float32(0)


class Table(CodeKind):
    """W = table[code] · scale."""

    group_sizes = (*GROUP_SIZES, 256)
    has_table = True

    def __init__(self, bits: int):
        self.bits = bits
        self.spellings = (Spelling(f"NF{bits}", "16", 64),)

    @property
    def _look_up(self) -> LookUp:
        target = current_target()
        if target.has_shared_rows:
            is_small = self.bits < 4 and target.has_spare_registers
            return InBoth() if is_small else InSharedRows()
        return InSharedMemory() if self.bits == 4 else InRegisters()

    def fit(
        self, groups: jax.Array, format: WeightFormat, table: jax.Array | None = None
    ) -> Parameters:
        """Scales that map an ascending table's larger end (default: normal float) to max|w|."""
        table = jnp.asarray(normal_float(self.bits)) if table is None else table
        scales = round_to(jnp.abs(groups).max(1) / jnp.abs(table).max(), jnp.float16)
        return Parameters(scales.astype(jnp.float16), table=table.astype(jnp.float32))

    def nearest(self, values: jax.Array, parameters: Parameters) -> jax.Array:
        """The index of the nearest entry."""
        assert parameters.table is not None
        scales = parameters.scales.astype(jnp.float32)
        # The scale of a group of zeros is 0: not every table has an entry 0.
        values = values / jnp.where(scales == 0, 1.0, scales)
        middles = (parameters.table[1:] + parameters.table[:-1]) / 2
        return jnp.searchsorted(middles, values, method="compare_all").astype(jnp.uint8)

    def decode(self, codes: jax.Array, parameters: Parameters) -> jax.Array:
        """table[code] · scale."""
        assert parameters.table is not None
        return parameters.table[codes] * parameters.scales.astype(jnp.float32)

    def pack(self, planes: jax.Array) -> jax.Array:
        """Packs codes to words as the module describes."""
        quads = _to_nibbles(planes)  # [..., quads, pairs of lanes, 8 nibbles]
        if self.bits == 2:
            quads = quads[..., 0::2, :, :] | (quads[..., 1::2, :, :] << jnp.uint8(2))
        if self.bits == 3:
            top = (quads[..., 3:, :, :] >> _quads(quads.ndim)) & jnp.uint8(1)
            quads = quads[..., :3, :, :] | (top << jnp.uint8(3))
        return _to_words(quads)

    def unpack(self, words: jax.Array) -> jax.Array:
        """The inverse of `pack`."""
        registers = _from_words(words)  # [..., columns, pairs, 8 nibbles]
        if self.bits == 2:
            halves = jnp.stack([registers & jnp.uint8(3), registers >> jnp.uint8(2)], -3)
            registers = halves.reshape(*halves.shape[:-4], -1, *halves.shape[-2:])
        if self.bits == 3:
            last = ((registers >> jnp.uint8(3)) << _quads(registers.ndim)).sum(
                -3, keepdims=True, dtype=jnp.uint8
            )
            registers = jnp.concatenate([registers & jnp.uint8(7), last], -3)
        return _from_nibbles(registers)

    def load(
        self, parameters: jax.Array, scale_dtype: str, operand: jnp.dtype, width: int
    ) -> Group:
        """The scale, from the word's low half, and a tile that decoding doesn't use (see Group)."""
        low = parameters.astype(jnp.uint16)
        scale = jax.lax.bitcast_convert_type(low, jnp.dtype(scale_dtype)).astype(jnp.float32)
        column = current_target().column
        return Group(column(scale, width), (column(low.astype(jnp.int16), width),))

    @property
    def shared_bytes(self) -> int:
        """The bytes of shared memory that the look-up takes, beside Triton's own."""
        return self._look_up.shared_bytes

    def shared(self, table: Any, operand: jnp.dtype, width: int) -> tuple[jax.Array, ...]:
        """The look-up's prepared table; without PTX, the table itself in `operand`."""
        if not current_target().has_ptx:
            return (table[...].astype(operand),)
        return self._look_up.prepare(table, self.bits, operand, width)

    def decoder(
        self,
        columns: list[jax.Array],
        arguments: tuple[jax.Array, ...],
        shared: tuple[jax.Array, ...],
        operand: jnp.dtype,
    ) -> Decoder:
        """Decodes to table[code] in `operand`; the planes of a quad share a tile of nibbles."""
        if not current_target().has_ptx:
            codes = self.unpack(jnp.stack(columns, -2))
            return lambda plane: shared[0][codes[..., plane, :].astype(jnp.int32)]
        [carried] = arguments

        @functools.cache
        def nibbles(quad: int) -> jax.Array:
            return self._nibbles(columns, quad, jnp.broadcast_to(carried, columns[0].shape))

        return self._look_up.decoder(nibbles, shared, operand)

    def _nibbles(self, columns: list[jax.Array], quad: int, carried: jax.Array) -> jax.Array:
        """The codes of a quad, each in a nibble.

        quad: its index. carried: unused; see Group.arguments.
        """
        inline_ptx = current_target().inline_ptx
        if self.bits == 4:
            return inline_ptx("mov.b32 $0, $1;", columns[0], carried, dtype=jnp.int16)
        if self.bits == 2:
            assembly = f"""{{
                .reg .b32 t;
                shr.b32 t, $1, {2 * (quad % 2)};
                and.b32 $0, t, 0x33333333;
            }}"""
            return inline_ptx(assembly, columns[quad // 2], carried, dtype=jnp.int16)
        if quad < 3:
            assembly = "and.b32 $0, $1, 0x77777777;"
            return inline_ptx(assembly, columns[quad], carried, dtype=jnp.int16)
        assembly = """{
            .reg .b32 t, u;
            shr.b32 t, $1, 3;
            and.b32 t, t, 0x11111111;
            shr.b32 u, $2, 2;
            lop3.b32 t, u, 0x22222222, t, 0xEA;
            shr.b32 u, $3, 1;
            lop3.b32 $0, u, 0x44444444, t, 0xEA;
        }"""
        return inline_ptx(assembly, *columns, carried, dtype=jnp.int16)


def _quads(rank: int) -> jax.Array:
    """The indices 0, 1 and 2 of the first three quads of three-bit codes, uint8 [..., 3, 1, 1].

    The bits of the last quad's codes are in the top bits of these quads' nibbles. The array is
    computed here because a kernel can't close over an array.
    """
    return jax.lax.broadcast_to_rank(jnp.arange(3, dtype=jnp.uint8)[:, None, None], rank)


def _to_nibbles(planes: jax.Array) -> jax.Array:
    """Codes [..., planes, width] as registers of nibbles, [..., planes / 4, width / 2, 8]."""
    *leading, count, width = planes.shape
    quads = planes.reshape(*leading, count // 4, 4, width // 2, 2)
    return jnp.swapaxes(quads, -3, -2).reshape(*leading, count // 4, width // 2, 8)


def _from_nibbles(quads: jax.Array) -> jax.Array:
    """The inverse of `_to_nibbles`."""
    *leading, count, pairs, _ = quads.shape
    planes = jnp.swapaxes(quads.reshape(*leading, count, pairs, 4, 2), -3, -2)
    return planes.reshape(*leading, count * 4, pairs * 2)


def _to_words(nibbles: jax.Array) -> jax.Array:
    """Nibbles [..., pairs, 8] as uint16 words [..., 2 · pairs]."""
    halves = nibbles.reshape(*nibbles.shape[:-1], 2, 4).astype(jnp.uint16)
    words = (halves << _nibble_shifts(halves.ndim)).sum(-1, dtype=jnp.uint16)
    return words.reshape(*nibbles.shape[:-2], -1)


def _from_words(words: jax.Array) -> jax.Array:
    """The inverse of `_to_words`."""
    words = words[..., None]
    nibbles = (words >> _nibble_shifts(words.ndim)) & jnp.uint16(0xF)
    return nibbles.reshape(*words.shape[:-2], -1, 8).astype(jnp.uint8)


def _nibble_shifts(rank: int) -> jax.Array:
    """The bit position of each nibble of a 16-bit word, uint16 [1, ..., 4]."""
    return jax.lax.broadcast_to_rank(jnp.arange(0, 16, 4, dtype=jnp.uint16), rank)
