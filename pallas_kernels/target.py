"""The target for which a kernel is traced: plain jnp, Triton, or the warpgroups of Mosaic GPU.

The mathematics of kernels are functions of jnp values, written once for all targets. If a target
has a special instruction, they call a method of `current_target()`. The launch functions set the
target while their kernel is traced. Outside of kernels, and in interpret mode, the target is plain
jnp.
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
    """The operations of kernels in plain jnp. Subclasses override them for a GPU.

    is_interpreted: whether the kernel runs as plain JAX, on any device.
    has_ptx: whether `inline_ptx` works. Functions with PTX use it if so, else an equivalent in jnp.
    has_shared_rows: whether a kernel has room in shared memory for rows with all pairs of a table's
        values (`codes.look_up.InSharedRows`).
    has_spare_registers: whether a kernel with such rows also has registers for a table of up to
        eight entries (`codes.look_up.InBoth`).
    """

    is_interpreted = True
    has_ptx = False
    has_shared_rows = False
    has_spare_registers = False

    def first_program_id(self) -> jax.Array:
        """The program's index along the grid's first axis; each kernel calls this once."""
        return pl.program_id(0)

    def dot(self, a: jax.Array, b: jax.Array, *, trans_b: bool = False) -> jax.Array:
        """A [n, k] · b [k, m], or b [m, k] with `trans_b`: [n, m], int32 for int8, else float32."""
        sum_dtype = jnp.int32 if a.dtype == jnp.int8 else jnp.float32
        dimensions = (((1,), (1 if trans_b else 0,)), ((), ()))
        return jax.lax.dot_general(a, b, dimensions, preferred_element_type=sum_dtype)

    def dot_float32(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """A [n, k] · b [k, m] of float32 numbers; on a GPU in three products of tf32."""
        return jnp.dot(a, b, precision=jax.lax.Precision.HIGHEST)

    def multiply_add(self, factor: jax.Array, other: jax.Array, addend: jax.Array) -> jax.Array:
        """Factor · other + addend in float32; the operands are broadcast."""
        return factor * other + addend

    def exp2(self, x: jax.Array) -> jax.Array:
        """2**x in float32; on a GPU to two units in the last place, with subnormals as zero."""
        return jnp.exp2(x)

    def log2(self, x: jax.Array) -> jax.Array:
        """The log2 of x in float32; on a GPU to 2**-22, absolute or relative; no subnormals."""
        return jnp.log2(x)

    def reciprocal(self, x: jax.Array) -> jax.Array:
        """1 / x in float32; on a GPU to one unit in the last place, with subnormals as zero."""
        return 1 / x

    def divide(self, numerator: jax.Array, denominator: jax.Array) -> jax.Array:
        """Numerator / denominator in float32, at least as exact as `arithmetic.divide`."""
        return arithmetic.divide(numerator, denominator)

    def times_power(self, x: jax.Array, exponent: int) -> jax.Array:
        """X · 2**exponent in float32, even if 2**exponent itself is out of range."""
        half = exponent // 2
        return x * 2.0**half * 2.0 ** (exponent - half) if exponent else x

    def narrow(self, x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Converts float32 x to `dtype`, bfloat16 or float16."""
        return x.astype(dtype)

    def widen(self, x: jax.Array) -> jax.Array:
        """Converts x, bfloat16 or float16, to float32."""
        return x.astype(jnp.float32)

    def round_to(self, x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Rounds float32 x to the nearest values of a floating-point `dtype`; returns float32."""
        return rounding.round_to(x, dtype)

    def split(self, x: jax.Array, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
        """Float32 x, rounded to `dtype`, bfloat16 or float16, and as float32 again."""
        rounded = self.round_to(x, dtype)
        return rounded.astype(dtype), rounded

    def column(self, x: jax.Array, width: int) -> jax.Array:
        """Reshapes values of output channels [tile_n] to broadcast to a tile [tile_n, width]."""
        return x[:, None]

    def inline_ptx(
        self, assembly: str, *arguments: jax.Array, dtype: jax.typing.DTypeLike
    ) -> jax.Array:
        """Applies PTX to tiles, one 32-bit register of neighbouring elements at a time.

        $0 is a register of the result, which has the shape of the first argument and `dtype`; $1 is
        a register of the first argument. Each has two elements of 16 bits or four of 8. An argument
        whose elements are n times as wide as the first argument's takes n operands.
        """
        self._missing("inline PTX")

    def register_column(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Converts 32-bit values of output channels [tile_n] to an argument of `inline_ptx`.

        shape: of the first argument of `inline_ptx`, a tile of words [tile_n, width]. The converted
        argument may fill several operands; the first operand has the channel's value.
        """
        self._missing("registers")

    def share_pairs(self, halves: Sequence[jax.Array]) -> jax.Array:
        """Fills shared memory with all pairs of a table's values for `look_up.InSharedMemory`.

        halves: the table's sixteen 16-bit values, two in each uint32 [1, 1]. Returns the address,
        int32 [1, 1]. A kernel calls this once, before its loop.
        """
        self._missing("shared memory for pairs of values")

    def fill_rows(
        self, table: Any, bits: int, operand: jnp.dtype, width: int
    ) -> tuple[jax.Array, jax.Array]:
        """Fills rows of shared memory with all pairs of a table's values for `InSharedRows`.

        table: a reference to float32 [2**bits]. operand: the 16-bit dtype of the values. Returns
        two int32 tiles [tile_n, width]: the byte offset of the thread's lane in a row, and the
        address of the rows.
        """
        self._missing("shared memory for rows of pairs")

    def table_bytes(
        self, table: Any, bits: int, operand: jnp.dtype, width: int
    ) -> tuple[jax.Array, ...]:
        """Loads a table of up to eight entries into registers, byte by byte, for `InBoth`.

        table: a reference to float32 [2**bits]. operand: the 16-bit dtype of the values. Returns
        int32 tiles [tile_n, width], each of one value: first the low bytes of the entries, four in
        a word, then the high bytes.
        """
        self._missing("registers for a table")

    def _missing(self, what: str) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__} has no {what}")


PLAIN = Target()
_current = contextvars.ContextVar("target", default=PLAIN)


def current_target() -> Target:
    """The target of the code that is being traced in this thread."""
    return _current.get()


@contextlib.contextmanager
def tracing_for(target: Target) -> Iterator[None]:
    """Makes `target` the current target in this thread while the context is open."""
    token = _current.set(target)
    try:
        yield
    finally:
        _current.reset(token)
