"""Table look-ups inside kernels, by codes in the nibbles of 32-bit registers.

A register has the codes of two neighbouring lanes in four planes: nibble n is the code of lane
n % 2 in plane n // 2. So a byte has two lanes' codes of one plane, and their two 16-bit values are
one register of an operand.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.kernels.launch import load
from mpjax.kernels.ptx import PAIR_BYTES
from mpjax.kernels.target import current_target

# A function from i to the codes of planes 4 · i … 4 · i + 3: 16-bit words, two per register.
Nibbles = Callable[[int], jax.Array]


class LookUp(abc.ABC):
    """A way to look up values of a table in PTX. Instances have no state."""

    shared_bytes = 0  # bytes of shared memory, in addition to Triton's own

    @abc.abstractmethod
    def prepare(
        self, table: Any, bits: int, operand: jnp.dtype, width: int
    ) -> tuple[jax.Array, ...]:
        """Prepares the table for `decoder`; a kernel calls this once, before its loop.

        table: a reference to float32 [2**bits].
        operand: the 16-bit dtype of decoded values.
        width: the width of tiles of words [tile_n, width].
        """

    @abc.abstractmethod
    def decoder(
        self, nibbles: Nibbles, prepared: tuple[jax.Array, ...], operand: jnp.dtype
    ) -> Callable[[int], jax.Array]:
        """A function from a plane's index to the values of its codes, a tile of dtype `operand`.

        prepared: the result of `prepare`.
        """


class InRegisters(LookUp):
    """Looks up tables of up to eight entries with `prmt`, in registers.

    `prmt` selects four bytes out of the eight bytes of two registers, by the nibbles of a selector.
    Codes in nibbles are such a selector. So one `prmt` looks up one byte of each of four values,
    and 16-bit values take two.
    """

    def prepare(
        self, table: Any, bits: int, operand: jnp.dtype, width: int
    ) -> tuple[jax.Array, ...]:
        """Tiles [1, 1] with the low bytes of all entries, four in each, then the high bytes."""
        halves = _halves(table, bits, operand)
        return tuple(
            current_target().inline_ptx(f"prmt.b32 $0, $1, $2, {selector};", *pair, dtype=jnp.int32)
            for selector in ("0x6420", "0x7531")
            for pair in zip(halves[::2], halves[1::2], strict=True)
        )

    def decoder(
        self, nibbles: Nibbles, prepared: tuple[jax.Array, ...], operand: jnp.dtype
    ) -> Callable[[int], jax.Array]:
        """Looks up two planes at a time, and then selects the bytes of one plane."""
        middle = len(prepared) // 2

        @functools.cache
        def look_up(pair: int) -> tuple[jax.Array, ...]:
            quad, half = divmod(pair, 2)
            indices = nibbles(quad)
            words = [jnp.broadcast_to(word, indices.shape) for word in prepared]
            # The first argument has 16-bit elements, so each 32-bit word of the table fills two
            # operands ($2 and $3, $4 and $5); only the first of each two is used.
            second = 4 if middle == 2 else 2
            assembly = f"""{{
                .reg .b32 indices;
                shr.b32 indices, $1, {16 * half};
                prmt.b32 $0, $2, ${second}, indices;
            }}"""
            return tuple(
                current_target().inline_ptx(assembly, indices, *table, dtype=jnp.int16)
                for table in (words[:middle], words[middle:])
            )

        def decode(plane: int) -> jax.Array:
            pair, second = divmod(plane, 2)
            assembly = f"prmt.b32 $0, $1, $2, {'0x7362' if second else '0x5140'};"
            return current_target().inline_ptx(assembly, *look_up(pair), dtype=operand)

        return decode


class InSharedMemory(LookUp):
    """Looks up tables of sixteen entries in shared memory, two values with each load.

    This is FLUTE's vectorised table (§3.2). Each lane of a warp has its own copy of all pairs of
    entries, in its own bank, so that loads have no bank conflicts. See `ptx.share_pairs`.
    """

    shared_bytes = PAIR_BYTES

    def prepare(
        self, table: Any, bits: int, operand: jnp.dtype, width: int
    ) -> tuple[jax.Array, ...]:
        """The address of the pairs, an int32 tile [1, 1]."""
        return (current_target().share_pairs(_halves(table, bits, operand)),)

    def decoder(
        self, nibbles: Nibbles, prepared: tuple[jax.Array, ...], operand: jnp.dtype
    ) -> Callable[[int], jax.Array]:
        """Loads the pair whose index is a byte of codes."""
        [address] = prepared

        def decode(plane: int) -> jax.Array:
            quad, byte = divmod(plane, 4)
            codes = nibbles(quad)
            # The address of the lane's own copy. It is computed here, because Triton assumes values
            # of `address` to be the same in all threads.
            own = current_target().inline_ptx(
                "{ .reg .b32 lane; mov.u32 lane, %laneid; mad.lo.u32 $0, lane, 4, $1; }",
                jnp.broadcast_to(address, codes.shape),
                dtype=jnp.int32,
            )
            assembly = f"""{{
                .reg .b32 pair, place;
                prmt.b32 pair, $1, 0, 0x444{byte};
                mad.lo.u32 place, pair, 128, $2;
                ld.shared.b32 $0, [place];
            }}"""
            return current_target().inline_ptx(assembly, codes, own, dtype=operand)

        return decode


# Bytes of a pair's row: four for each lane of a warp, and 128 unused, so that the offset of a row
# is its index shifted by a byte.
ROW_BYTES = 256


def pair_rows(bits: int) -> int:
    """The number of rows of a table's pairs; the pair of entries i and j is row i + 16 · j."""
    return 17 * (2**bits - 1) + 1


class InSharedRows(LookUp):
    """Looks up tables of any size in rows of ROW_BYTES in shared memory, a row for each pair.

    A byte of codes is the index of a row. The offset of a lane's word is that byte shifted by one
    byte, with the lane's offset in the lowest byte: one `prmt` computes it.
    """

    def prepare(
        self, table: Any, bits: int, operand: jnp.dtype, width: int
    ) -> tuple[jax.Array, ...]:
        """The offset of the thread's lane in a row, and the address of the rows, as int32 tiles."""
        return current_target().fill_rows(table, bits, operand, width)

    def decoder(
        self, nibbles: Nibbles, prepared: tuple[jax.Array, ...], operand: jnp.dtype
    ) -> Callable[[int], jax.Array]:
        """Loads from the row whose index is a byte of codes."""

        def decode(plane: int) -> jax.Array:
            quad, byte = divmod(plane, 4)
            # The first argument has 16-bit elements, so each 32-bit argument fills two operands: $2
            # and $3 have the lane's offset, $4 and $5 the address. Only $2 and $4 are used.
            assembly = f"""{{
                .reg .b32 place;
                prmt.b32 place, $1, $2, 0x77{byte}4;
                add.u32 place, place, $4;
                ld.shared.b32 $0, [place];
            }}"""
            return current_target().inline_ptx(assembly, nibbles(quad), *prepared, dtype=operand)

        return decode


class InBoth(LookUp):
    """Looks up half of the codes in registers and half in rows of shared memory.

    For tables of up to eight entries. Shared memory serves one warp at a time; registers serve all
    warps, but take more `prmt`. Dividing the codes uses both at once.
    """

    def prepare(
        self, table: Any, bits: int, operand: jnp.dtype, width: int
    ) -> tuple[jax.Array, ...]:
        """The prepared tiles of InRegisters, followed by the two of InSharedRows."""
        target = current_target()
        return (
            *target.table_bytes(table, bits, operand, width),
            *target.fill_rows(table, bits, operand, width),
        )

    def decoder(
        self, nibbles: Nibbles, prepared: tuple[jax.Array, ...], operand: jnp.dtype
    ) -> Callable[[int], jax.Array]:
        """Looks up the first two of every four planes in registers, the other two in rows.

        `prmt` takes the selector from the lower half of a register, where the first two planes are.
        """
        in_registers = InRegisters().decoder(nibbles, prepared[:-2], operand)
        in_rows = InSharedRows().decoder(nibbles, prepared[-2:], operand)
        return lambda plane: (in_registers if plane % 4 < 2 else in_rows)(plane)


def _halves(table: Any, bits: int, operand: jnp.dtype) -> list[jax.Array]:
    """The values of a table in `operand`, two in each uint32 tile [1, 1]."""

    def entry(index: int) -> jax.Array:
        # A tile [1, 1] instead of a scalar: Triton can give a broadcast tile the layout of an
        # operand, but not a scalar that is spread over a tile.
        value = load(table.at[jnp.full((1, 1), index)]).astype(operand)
        return jax.lax.bitcast_convert_type(value, jnp.uint16).astype(jnp.uint32)

    return [entry(i) | (entry(i + 1) << jnp.uint32(16)) for i in range(0, 2**bits, 2)]
