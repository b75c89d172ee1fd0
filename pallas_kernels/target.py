"""What a kernel is traced for: the interpreter, Triton, or the warpgroups of Mosaic GPU.

Kernel mathematics is functions of jnp values, the same for every target. What a target does with
an instruction of its own, these functions ask of `current_target()`. A launcher sets the target of
its kernel while the kernel is traced. Everywhere else, and in kernels that are interpreted, the
target is plain jnp.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels import arithmetic, rounding


class Target:
    """Plain jnp: every operation as a reader would write it. Other targets override it.

    is_interpreted: whether the kernel runs as plain JAX, on any device.
    has_ptx: whether there is inline PTX. What has both PTX and a twin in jnp is its twin without.
    has_shared_rows: whether a kernel has room in shared memory for the rows of all pairs of a
        table's values (`codes.look_up.InSharedRows`).
    has_spare_registers: whether a kernel with such rows has registers for a table of up to eight
        entries, too.
    """

    is_interpreted = True
    has_ptx = False
    has_shared_rows = False
    has_spare_registers = False

    def first_program_id(self) -> jax.Array:
        """The program's index along the grid's first axis; each kernel asks for it once."""
        return pl.program_id(0)

    def dot(self, a: jax.Array, b: jax.Array, *, trans_b: bool = False) -> jax.Array:
        """A [n, k] · b [k, m] (or [m, k]), summed in int32 for int8 operands, else in float32."""
        sum_dtype = jnp.int32 if a.dtype == jnp.int8 else jnp.float32
        dimensions = (((1,), (1 if trans_b else 0,)), ((), ()))
        return jax.lax.dot_general(a, b, dimensions, preferred_element_type=sum_dtype)

    def multiply_add(self, factor: jax.Array, other: jax.Array, addend: jax.Array) -> jax.Array:
        """Factor · other + addend in float32, broadcast."""
        return factor * other + addend

    def exp2(self, x: jax.Array) -> jax.Array:
        """2**x in float32; on a GPU to two units in the last place, and subnormals are zero."""
        return jnp.exp2(x)

    def log2(self, x: jax.Array) -> jax.Array:
        """The log2 of x in float32; on a GPU to 2**-22, absolute or relative; no subnormals."""
        return jnp.log2(x)

    def reciprocal(self, x: jax.Array) -> jax.Array:
        """1 / x in float32; on a GPU to one unit in the last place, and subnormals are zero."""
        return 1 / x

    def divide(self, numerator: jax.Array, denominator: jax.Array) -> jax.Array:
        """Numerator / denominator in float32, rounded as `arithmetic.divide` says, or correctly."""
        return arithmetic.divide(numerator, denominator)

    def times_power(self, x: jax.Array, exponent: int) -> jax.Array:
        """X · 2**exponent in float32, also where the power itself is beyond float32's range."""
        half = exponent // 2
        return x * 2.0**half * 2.0 ** (exponent - half) if exponent else x

    def narrow(self, x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Float32 x in `dtype`, bfloat16 or float16."""
        return x.astype(dtype)

    def widen(self, x: jax.Array) -> jax.Array:
        """X, bfloat16 or float16, in float32."""
        return x.astype(jnp.float32)

    def round_to(self, x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Float32 x, each value rounded to the nearest of a floating-point `dtype`."""
        return rounding.round_to(x, dtype)

    def column(self, x: jax.Array, width: int) -> jax.Array:
        """A value for each output channel [tile_n] as what broadcasts to a tile [tile_n, width]."""
        return x[:, None]

    def inline_ptx(
        self, assembly: str, *arguments: jax.Array, dtype: jax.typing.DTypeLike
    ) -> jax.Array:
        """Applies PTX to 32-bit registers of neighbouring elements; a tile like the first argument.

        A register of the first argument, and of the result in `dtype`, holds two elements of 16
        bits or four of 8. An argument of wider elements than the first fills as many more operands.
        """
        self._missing("inline PTX")

    def register_column(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """32 bits for each output channel [tile_n] as an argument of `inline_ptx` beside words.

        shape: of the tile of words, the first argument. The argument's first operand holds them.
        """
        self._missing("registers")

    def share_pairs(self, halves: Sequence[jax.Array]) -> jax.Array:
        """Fills shared memory with all pairs of a table's values: `codes.look_up.InSharedMemory`.

        halves: the table's sixteen values of 16 bits, two in each uint32 [1, 1]. Returns the
        address, int32 [1, 1]. A kernel calls this once, before its loop.
        """
        self._missing("shared memory for pairs of values")

    def fill_rows(
        self, table: Any, bits: int, operand: jnp.dtype, width: int
    ) -> tuple[jax.Array, jax.Array]:
        """Fills rows in shared memory with all pairs of a table: `codes.look_up.InSharedRows`.

        table: a reference to float32 [2**bits]. Returns each lane's place in a row, and the address
        of the rows, as tiles [tile_n, width] of int32.
        """
        self._missing("shared memory for rows of pairs")

    def table_bytes(
        self, table: Any, bits: int, operand: jnp.dtype, width: int
    ) -> tuple[jax.Array, ...]:
        """The bytes of up to eight entries of a table in `operand`: `codes.look_up.InBoth`.

        Returns tiles [tile_n, width] of one int32 each: the low bytes of the entries, four in a
        word, then the high bytes.
        """
        self._missing("registers for a table")

    def _missing(self, what: str) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__} has no {what}")


PLAIN = Target()
_current = contextvars.ContextVar("target", default=PLAIN)


def current_target() -> Target:
    """What the code that runs now is traced for."""
    return _current.get()


@contextlib.contextmanager
def tracing_for(target: Target) -> Iterator[None]:
    """Inside, in this thread, kernel mathematics is traced for `target`."""
    token = _current.set(target)
    try:
        yield
    finally:
        _current.reset(token)
