"""Ways for a kernel to look up the codes that lie in the nibbles of 32-bit registers.

Nibble n of a register is the code of lane n % 2 of two, in plane n // 2 of four: so a byte is two
neighbouring lanes' codes of one plane, and their values are one register of an operand.
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

Nibbles = Callable[[int], jax.Array]  # of planes 4 · i … 4 · i + 3: tiles of 16-bit words


class LookUp(abc.ABC):
    """How the values of a table are found, in PTX. It holds no state."""

    shared_bytes = 0  # of shared memory, apart from Triton's own

    @abc.abstractmethod
    def prepare(
        self, table: Any, bits: int, operand: jnp.dtype, width: int
    ) -> tuple[jax.Array, ...]:
        """Before the loop: what `decoder` takes, from a reference to float32 [2**bits].

        width: of tiles of words [tile_n, width].
        """

    @abc.abstractmethod
    def decoder(
        self, nibbles: Nibbles, prepared: tuple[jax.Array, ...], operand: jnp.dtype
    ) -> Callable[[int], jax.Array]:
        """A function from a plane to the values of its codes, in `operand`."""


class InRegisters(LookUp):
    """Tables of up to eight entries: `prmt` picks bytes by the nibbles of a selector.

    Codes that lie in nibbles are selectors already. One `prmt` looks up a byte of four codes in the
    eight bytes of two registers; a 16-bit value takes two.
    """

    def prepare(
        self, table: Any, bits: int, operand: jnp.dtype, width: int
    ) -> tuple[jax.Array, ...]:
        """All entries' low bytes, four in a register, then all high bytes: tiles of one value."""
        halves = _halves(table, bits, operand)
        return tuple(
            current_target().inline_ptx(f"prmt.b32 $0, $1, $2, {selector};", *pair, dtype=jnp.int32)
            for selector in ("0x6420", "0x7531")
            for pair in zip(halves[::2], halves[1::2], strict=True)
        )

    def decoder(
        self, nibbles: Nibbles, prepared: tuple[jax.Array, ...], operand: jnp.dtype
    ) -> Callable[[int], jax.Array]:
        """The look-up of two planes is shared between them."""
        middle = len(prepared) // 2

        @functools.cache
        def look_up(pair: int) -> tuple[jax.Array, ...]:
            quad, half = divmod(pair, 2)
            indices = nibbles(quad)
            words = [jnp.broadcast_to(word, indices.shape) for word in prepared]
            # A 32-bit argument fills two operands of the assembly, of which the first is used.
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
    """Tables of sixteen entries: one load finds two values (FLUTE's vectorised table, §3.2).

    All pairs of entries lie in shared memory once for each lane of a warp, so that no two lanes
    ever ask the same bank.
    """

    shared_bytes = PAIR_BYTES

    def prepare(
        self, table: Any, bits: int, operand: jnp.dtype, width: int
    ) -> tuple[jax.Array, ...]:
        """The address of the pairs, a tile [1, 1]."""
        return (current_target().share_pairs(_halves(table, bits, operand)),)

    def decoder(
        self, nibbles: Nibbles, prepared: tuple[jax.Array, ...], operand: jnp.dtype
    ) -> Callable[[int], jax.Array]:
        """A byte of codes is the number of a pair."""
        [address] = prepared

        def decode(plane: int) -> jax.Array:
            quad, byte = divmod(plane, 4)
            codes = nibbles(quad)
            # A lane's own copy; until here, all threads have to hold the same.
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


# Of a pair of entries: four for each lane of a warp, and as many unused, so that the place of a row
# is its number moved up by a byte.
ROW_BYTES = 256


def pair_rows(bits: int) -> int:
    """How many rows there are for the pairs of a table: entries i and j are row i + 16 · j."""
    return 17 * (2**bits - 1) + 1


class InSharedRows(LookUp):
    """Tables of any size, where a kernel has room for rows of ROW_BYTES.

    A byte of codes is the number of its pair's row, and moved up by one byte the place of the row;
    the lowest byte is the lane's place in it. So `prmt` makes the whole address.
    """

    def prepare(
        self, table: Any, bits: int, operand: jnp.dtype, width: int
    ) -> tuple[jax.Array, ...]:
        """Each lane's place in a row, and the address of the rows: tiles."""
        return current_target().fill_rows(table, bits, operand, width)

    def decoder(
        self, nibbles: Nibbles, prepared: tuple[jax.Array, ...], operand: jnp.dtype
    ) -> Callable[[int], jax.Array]:
        """A byte of codes is the number of a row."""

        def decode(plane: int) -> jax.Array:
            quad, byte = divmod(plane, 4)
            # A 32-bit argument fills two operands of the assembly, of which the first is used.
            assembly = f"""{{
                .reg .b32 place;
                prmt.b32 place, $1, $2, 0x77{byte}4;
                add.u32 place, place, $4;
                ld.shared.b32 $0, [place];
            }}"""
            return current_target().inline_ptx(assembly, nibbles(quad), *prepared, dtype=operand)

        return decode


class InBoth(LookUp):
    """Tables of up to eight entries where there are both rows and registers: half of codes each.

    Shared memory finds values for one warp at a time. Registers do for all, with twice as many
    `prmt`.
    """

    def prepare(
        self, table: Any, bits: int, operand: jnp.dtype, width: int
    ) -> tuple[jax.Array, ...]:
        """What registers take, and the two of rows."""
        target = current_target()
        return (
            *target.table_bytes(table, bits, operand, width),
            *target.fill_rows(table, bits, operand, width),
        )

    def decoder(
        self, nibbles: Nibbles, prepared: tuple[jax.Array, ...], operand: jnp.dtype
    ) -> Callable[[int], jax.Array]:
        """Of four planes the first two in registers: their nibbles are where `prmt` reads them."""
        in_registers = InRegisters().decoder(nibbles, prepared[:-2], operand)
        in_rows = InSharedRows().decoder(nibbles, prepared[-2:], operand)
        return lambda plane: (in_registers if plane % 4 < 2 else in_rows)(plane)


def _halves(table: Any, bits: int, operand: jnp.dtype) -> list[jax.Array]:
    """The values of a table, two in each uint32 [1, 1]."""

    def entry(index: int) -> jax.Array:
        # A tile of one element rather than a scalar: a broadcast tile can take the layout of an
        # operand, a scalar that is spread over a tile can't.
        value = load(table.at[jnp.full((1, 1), index)]).astype(operand)
        return jax.lax.bitcast_convert_type(value, jnp.uint16).astype(jnp.uint32)

    return [entry(i) | (entry(i + 1) << jnp.uint32(16)) for i in range(0, 2**bits, 2)]
