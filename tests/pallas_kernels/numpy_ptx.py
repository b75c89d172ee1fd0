"""An interpreter, in numpy, of the inline PTX with which kernels decode weights.

Its targets stand in for a GPU, so that what a decoder computes can be checked on any machine:
inside `tracing_for(NumpyPTX())`, and in kernels that are interpreted there, inline PTX runs in
numpy.
Written from NVIDIA's manual of the PTX ISA; whatever it doesn't know, it refuses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels.codes.look_up import ROW_BYTES, pair_rows
from mpjax.kernels.target import Target

U16, U32, U64 = np.uint16, np.uint32, np.uint64

LANES = 32  # of a warp
SHARED_ADDRESS = 4096  # where `share_pairs` puts its words; not 0, which would hide a missing base
_shared = np.zeros(0, U32)


class Half(NamedTuple):
    """A 16-bit float by its bits: XLA's threads, in which this runs, take subnormals for zeros."""

    exponent_bits: int
    mantissa_bits: int

    @property
    def lowest(self) -> int:
        """Exponent of the smallest normal value."""
        return 2 - 2 ** (self.exponent_bits - 1)

    def values(self, bits: np.ndarray) -> np.ndarray:
        """float64, exact."""
        exponent = (bits & U16(0x7FFF)).astype(int) >> self.mantissa_bits
        mantissa = bits.astype(int) & (2**self.mantissa_bits - 1)
        leading = (exponent > 0) * 2**self.mantissa_bits
        scale = np.maximum(exponent, 1) - 1 + self.lowest - self.mantissa_bits
        values = np.ldexp((mantissa + leading).astype(float), scale)
        special = np.where(mantissa == 0, np.inf, np.nan)
        values = np.where(exponent == 2**self.exponent_bits - 1, special, values)
        return np.copysign(values, np.where(bits >> U16(15), -1.0, 1.0))

    def bits(self, values: np.ndarray) -> np.ndarray:
        """uint16: float64 in one rounding to nearest, ties to even."""
        infinity = (2**self.exponent_bits - 1) << self.mantissa_bits
        finite = np.where(np.isfinite(values), np.abs(values), 0)
        exponent = np.where(finite > 0, np.frexp(finite)[1] - 1, self.lowest)
        exponent = np.maximum(exponent, self.lowest)
        steps = np.rint(np.ldexp(finite, self.mantissa_bits - exponent)).astype(np.int64)
        # A mantissa that is rounded up to two carries into the exponent, as it should.
        bits = np.minimum(((exponent - self.lowest) << self.mantissa_bits) + steps, infinity)
        bits = np.where(np.isinf(values), infinity, np.where(np.isnan(values), 0x7FFF, bits))
        return (bits | np.signbit(values) << 15).astype(U16)


BFLOAT16, FLOAT16 = Half(8, 7), Half(5, 10)


class NumpyPTX(Target):
    """An interpreter that has inline PTX, too; it counts the snippets that it was given."""

    has_ptx = True

    def __init__(self) -> None:
        self.snippets = 0

    def inline_ptx(
        self, assembly: str, *arguments: jax.Array, dtype: jax.typing.DTypeLike
    ) -> jax.Array:
        """In traced code also."""
        self.snippets += 1
        shape = arguments[0].shape

        def compute(*arrays: jax.Array) -> np.ndarray:
            operands = [register for array in arrays for register in registers(array, arrays[0])]
            return run(assembly, operands).view(np.dtype(dtype)).reshape(shape)

        for argument in arguments:
            assert argument.shape == shape, f"shapes {argument.shape} and {shape} differ"
        return jax.pure_callback(compute, jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), *arguments)

    def register_column(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Beside each register, the first operand of several."""
        return jnp.broadcast_to(x[:, None], shape)

    def share_pairs(self, halves: Sequence[jax.Array]) -> jax.Array:
        """A word for each pair of entries, and a copy of it for each lane."""

        def compute(*words: jax.Array) -> np.ndarray:
            global _shared
            values = np.concatenate([np.asarray(word).reshape(-1) for word in words]).view(U16)
            number = np.arange(256)
            low, high = (values[i].astype(U32) for i in (number % 16, number // 16))
            _shared = np.repeat(low | high << U32(16), LANES)
            return np.full((1, 1), SHARED_ADDRESS, np.int32)

        return jax.pure_callback(compute, jax.ShapeDtypeStruct((1, 1), jnp.int32), *halves)


class WithSubnormals(NumpyPTX):
    """Floats beside PTX as on a GPU, where subnormals count: XLA takes them for zeros."""

    def dot(self, a: jax.Array, b: jax.Array, *, trans_b: bool = False) -> jax.Array:
        """A product of floats as the tensor cores make it."""

        def compute(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            return _wide(a) @ (_wide(b).T if trans_b else _wide(b))

        return _call(compute, (a.shape[0], b.shape[0 if trans_b else 1]), jnp.float32, a, b)

    def narrow(self, x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """To the nearest, subnormals among them."""
        dtype = jnp.dtype(dtype)

        def compute(x: np.ndarray) -> np.ndarray:
            return _HALVES[dtype.name].bits(x.astype(float)).view(dtype)

        return _call(compute, x.shape, dtype, x)

    def widen(self, x: jax.Array) -> jax.Array:
        """Exact."""
        return _call(_wide, x.shape, jnp.float32, x)

    def times_power(self, x: jax.Array, exponent: int) -> jax.Array:
        """At once: of two factors XLA, unlike Triton, may make an infinite one."""
        return _call(lambda x: np.ldexp(x.astype(float), exponent), x.shape, x.dtype, x)


class SharedRows(NumpyPTX):
    """A kernel with room for the rows of a table's pairs, whose tiles have so many rows."""

    has_shared_rows = True

    def __init__(self, rows: int, *, has_spare_registers: bool = False) -> None:
        super().__init__()
        self.rows, self.has_spare_registers = rows, has_spare_registers

    def table_bytes(
        self, table: np.ndarray, bits: int, operand: jnp.dtype, width: int
    ) -> tuple[jax.Array, ...]:
        """Tiles of one word."""
        halves = table.astype(operand).view(np.uint8).reshape(2**bits, 2).T
        words = np.ascontiguousarray(halves).reshape(-1, 4).view(np.int32)
        return tuple(jnp.full((self.rows, width), word, jnp.int32) for word in words.ravel())

    def fill_rows(
        self, table: np.ndarray, bits: int, operand: jnp.dtype, width: int
    ) -> tuple[jax.Array, jax.Array]:
        """A word for each lane in each row; whatever else is read is no value of the table."""
        global _shared
        values, number = table.astype(operand).view(U16), np.arange(pair_rows(bits))
        low, high = (values[i % len(table)].astype(U32) for i in (number % 16, number // 16))
        rows = np.full((len(number), ROW_BYTES // 4), 0xDEADBEEF, U32)
        rows[:, :LANES] = (low | high << U32(16))[:, None]
        _shared = rows.reshape(-1)
        register = np.arange(self.rows * width // 2, dtype=np.int32)
        lanes = np.repeat(register % LANES * 4, 2).reshape(self.rows, width)
        return jnp.asarray(lanes), jnp.full(lanes.shape, SHARED_ADDRESS, jnp.int32)


_HALVES = {"bfloat16": BFLOAT16, "float16": FLOAT16}


def _wide(x: np.ndarray) -> np.ndarray:
    """float64, exact, whatever XLA's threads make of subnormals."""
    return _HALVES[x.dtype.name].values(x.view(U16)) if x.dtype.itemsize == 2 else x.astype(float)


def _call(
    compute: Callable[..., np.ndarray], shape: tuple[int, ...], dtype: Any, *arguments: jax.Array
) -> jax.Array:
    def cast(*arrays: jax.Array) -> np.ndarray:
        return compute(*map(np.asarray, arrays)).astype(dtype)

    return jax.pure_callback(cast, jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), *arguments)


def registers(array: jax.Array, first: jax.Array) -> list[np.ndarray]:
    """The operands that `array` fills: uint32 [registers], as many as its elements are wider.

    A register of the first argument holds neighbours of the last axis, the first lowest.
    """
    neighbours = 4 // first.dtype.itemsize
    assert array.shape[-1] % neighbours == 0, f"{array.shape[-1]} elements don't fill registers"
    assert array.dtype.itemsize >= first.dtype.itemsize, "an argument is narrower than the first"
    words = np.ascontiguousarray(array).reshape(-1, neighbours).view(U32)
    return [np.ascontiguousarray(words[:, i]) for i in range(words.shape[1])]


def run(assembly: str, operands: list[np.ndarray]) -> np.ndarray:
    """The content of $0 after the assembly ran, given $1 … as uint32 [registers]."""
    text = re.sub(r"//.*", "", assembly).strip()
    is_block = text.startswith("{") and text.endswith("}")
    known = {f"${i + 1}": operand for i, operand in enumerate(operands)}
    known["%laneid"] = np.arange(len(operands[0]), dtype=U32) % U32(LANES)
    declared = {"$0"}
    for statement in (text[1:-1] if is_block else text).split(";"):
        name, _, rest = statement.strip().partition(" ")
        fields = [field.strip() for field in rest.split(",")]
        if not name:
            continue
        if name == ".reg":
            # Outside of braces, a name would clash where the snippet occurs twice.
            assert is_block, f"{statement.strip()!r} stands outside of braces"
            names = [fields[0].removeprefix(".b32").strip(), *fields[1:]]
            assert fields[0].startswith(".b32 "), f"{statement.strip()!r} declares no .b32"
            assert not declared & set(names), f"{statement.strip()!r} declares a name twice"
            declared |= set(names)
            continue
        instruction = _INSTRUCTIONS.get(name)
        if instruction is None:
            raise NotImplementedError(f"PTX instruction {name!r} in {statement.strip()!r}")
        target, *sources = fields
        if name.endswith("x2") and any(source[0].isdigit() for source in sources):
            raise ValueError(f"{name} takes registers alone: {statement.strip()!r}")
        assert target in declared, f"{target!r} is not declared"
        values = [_value(source, known) for source in sources]
        known[target] = np.broadcast_to(instruction(*values), operands[0].shape)
    return np.ascontiguousarray(known["$0"])


def _value(source: str, known: dict[str, np.ndarray]) -> np.ndarray:
    if source.startswith("["):
        place = _value(source.strip("[]"), known) - U32(SHARED_ADDRESS)
        assert (place % 4 == 0).all(), "words are aligned"
        return _shared[place // 4]
    if re.fullmatch(r"0x[0-9A-Fa-f]{1,8}|\d+", source):
        return np.asarray(int(source, 0), U32)
    if source not in known:
        raise NameError(f"{source!r} is read before it is written")
    return known[source]


def _shift(by: np.ndarray) -> np.ndarray:
    return np.minimum(by, 32).astype(U64)


def _lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Bit 4a + 2b + c of the table, for each bit of the operands."""
    out = np.zeros_like(a)
    for row in range(8):
        if int(table) >> row & 1:
            out = out | (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return out


def _prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Byte i is that byte of b:a that the low three bits of nibble i say, or its sign repeated."""
    pair = a.astype(U64) | b.astype(U64) << U64(32)
    out = np.zeros_like(a)
    for i in range(4):
        nibble = selector >> U32(4 * i) & U32(15)
        byte = (pair >> (nibble & U32(7)).astype(U64) * U64(8)).astype(U32) & U32(0xFF)
        sign = np.where(byte & U32(0x80), U32(0xFF), U32(0))
        out = out | np.where(nibble & U32(8), sign, byte) << U32(8 * i)
    return out


def _fused_multiply_add(half: Half) -> Callable[..., np.ndarray]:
    def fma(*registers: np.ndarray) -> np.ndarray:
        x, y, z = (half.values(np.ascontiguousarray(r)[..., None].view(U16)) for r in registers)
        with np.errstate(invalid="ignore"):  # infinities make NaN, here as there
            product = x * y  # exact: 22 bits at most
            total = product + z
            rest = (product - (total - z)) + (z - (total - (total - z)))
        if np.any(rest[np.isfinite(total)]):
            raise NotImplementedError("a sum that float64 can't hold")
        return half.bits(total).view(U32)[..., 0]

    return fma


def _minimum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = np.broadcast_arrays(a, b)
    x, y = (np.ascontiguousarray(r)[..., None].view(U16) for r in (a, b))
    return np.where(FLOAT16.values(y) < FLOAT16.values(x), y, x).view(U32)[..., 0]


_INSTRUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "ld.shared.b32": lambda word: word,
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "xor.b32": np.bitwise_xor,
    "not.b32": np.bitwise_not,
    "neg.bf16x2": lambda a: a ^ U32(0x80008000),
    "neg.f16x2": lambda a: a ^ U32(0x80008000),
    "shr.b32": lambda a, by: (a.astype(U64) >> _shift(by)).astype(U32),
    "shr.u32": lambda a, by: (a.astype(U64) >> _shift(by)).astype(U32),
    "shl.b32": lambda a, by: (a.astype(U64) << _shift(by)).astype(U32),
    "add.u32": np.add,
    "mad.lo.u32": lambda a, b, c: (a.astype(U64) * b + c).astype(U32),
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "fma.rn.bf16x2": _fused_multiply_add(BFLOAT16),
    "fma.rn.f16x2": _fused_multiply_add(FLOAT16),
    "min.f16x2": _minimum,
}
