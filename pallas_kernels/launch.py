"""Launches kernels of Pallas-Triton; the only module that imports that backend.

Kernels use this module's loads, stores and launches, and call the current target (`target`) for
operations with a special instruction. So another backend would change this file and the callers of
`launch`, but not the mathematics of kernels. JAX deprecated the backend in 0.11 and still ships it
in 0.12; importing this module silences its warning.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.pallas.triton import lowering
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from mpjax.kernels import device, ptx, varying_axes
from mpjax.kernels.registers import (
    MOST_REGISTERS,
    limit_registers,
    limit_registers_p,
    lower_limit_registers,
)
from mpjax.kernels.target import Target, current_target, tracing_for

warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
lowering.register_lowering(limit_registers_p)(lower_limit_registers)

EARLY_LAUNCH_CAPABILITY = 9.0  # the first with programmatic dependent launch

# Annotations give a Pallas reference the type of its array.
load: Callable[..., jax.Array] = plgpu.load
store: Callable[..., None] = plgpu.store


def load_masked(ref: Any, mask: jax.Array | None) -> jax.Array:
    """Loads a tile; masked-out elements are zero.

    mask: bools, one for each row of the tile, or broadcastable to it. None loads without a mask,
        which lets the compiler use its widest copies.
    """
    if mask is None:
        return load(ref)
    if mask.ndim == 1:
        mask = mask.reshape(-1, *[1] * (len(ref.shape) - 1))
    return load(ref, mask=jnp.broadcast_to(mask, ref.shape), other=jnp.zeros((), ref.dtype))


def join(tiles: Sequence[jax.Array]) -> jax.Array:
    """Concatenates a power of two of tiles [n, k] along k, without moving values in registers."""
    while len(tiles) > 1:
        tiles = [
            jnp.stack(pair, -1).transpose(0, 2, 1).reshape(len(pair[0]), 2 * pair[0].shape[1])
            for pair in zip(tiles[::2], tiles[1::2], strict=True)
        ]
    return tiles[0]


def first_program_id() -> jax.Array:
    """The program's index along the grid's first axis; each kernel calls this once.

    On a GPU, the call also puts two settings of the launch into the kernel's code, for which Pallas
    has no parameter: the limit of registers, and that the next kernel may be launched early (see
    `Triton`). They are tied to the index, since every kernel uses it; otherwise the compiler would
    remove them as dead code.
    """
    return current_target().first_program_id()


@dataclasses.dataclass(frozen=True)
class Settings:
    """A kernel's name and compiler settings.

    warps: of a program. stages: iterations of a loop whose loads are in flight at a time.
    registers: the most registers of a thread, in a kernel that calls `first_program_id`; None
        leaves it to the assembler, which reserves room for programs that may never run.

    Raises ValueError for more registers than a thread can have.
    """

    name: str
    warps: int = 1
    stages: int = 1
    registers: int | None = None

    def __post_init__(self) -> None:
        if self.registers is not None and not 0 < self.registers <= MOST_REGISTERS:
            raise ValueError(
                f"{self.name}: {self.registers} registers: expected 1 to {MOST_REGISTERS}"
            )


def launch(
    kernel: Callable[..., None],
    *arguments: Any,
    settings: Settings,
    out_shape: Any,
    grid: tuple[int, ...],
    interpret: bool,
    aliases: dict[int, int] | None = None,
) -> Any:
    """Launches a kernel over whole arrays in global memory.

    The kernel gets a reference to each array of its arguments and outputs, in the same trees, and
    indexes them itself.

    out_shape: a tree of `jax.ShapeDtypeStruct`s.
    interpret: run as plain JAX on any device, traced for the current target.
    aliases: index of an argument's array → index of the output that reuses its buffer.
    """

    def run(*references: Any) -> None:
        with tracing_for(current_target() if interpret else Triton.here(settings.registers)):
            kernel(*references)

    arguments = varying_axes.vary_alike(arguments)
    call = pl.pallas_call(
        run,
        out_shape=varying_axes.varying_like(out_shape, arguments),
        grid=grid,
        input_output_aliases=aliases or {},
        compiler_params=plgpu.CompilerParams(num_warps=settings.warps, num_stages=settings.stages),
        interpret=interpret,
        name=settings.name,
    )
    with jax.enable_x64(False):  # the indices of kernels are int32
        return call(*arguments)


class Triton(Target):
    """The target of kernels that Triton compiles for a GPU.

    early: whether the next kernel may be launched as soon as all programs of this kernel have begun
        ("programmatic dependent launch", compute capability 9.0). XLA makes a kernel that is
        launched early wait for the end of the previous kernel before it reads anything, so this
        hides only the launch latency.
    registers: the most registers of a thread; None leaves the choice to the assembler.
    """

    is_interpreted = False
    has_ptx = True

    def __init__(self, *, early: bool = False, registers: int | None = None) -> None:
        self.early, self.registers = early, registers

    @classmethod
    def here(cls, registers: int | None) -> Triton:
        """The target of a kernel for the default device. registers: as for the class."""
        capability = device.compute_capability() or 0.0
        return cls(early=capability >= EARLY_LAUNCH_CAPABILITY, registers=registers)

    def first_program_id(self) -> jax.Array:
        """The program's index; limits registers and allows the next kernel's early launch."""
        index = super().first_program_id()
        if self.registers is not None:
            index = limit_registers(index, self.registers)
        if not self.early:
            return index
        # Without the index as its operand, the compiler would remove the assembly as dead code.
        tile = jnp.full((1,), index, jnp.int32)
        assembly = "griddepcontrol.launch_dependents; mov.b32 $0, $1;"
        return self.inline_ptx(assembly, tile, dtype=jnp.int32).max()

    def dot_float32(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """A [n, k] · b [k, m] of float32 numbers, in three products of tf32."""
        return jnp.dot(a, b, precision=jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3)

    def multiply_add(self, factor: jax.Array, other: jax.Array, addend: jax.Array) -> jax.Array:
        """Factor · other + addend as one `fma`, which the compiler doesn't make of `*` and `+`."""
        return _float32_ptx("fma.rn.f32 $0, $1, $2, $3;", factor, other, addend)

    def exp2(self, x: jax.Array) -> jax.Array:
        """2**x in one instruction."""
        return _float32_ptx("ex2.approx.ftz.f32 $0, $1;", x)

    def log2(self, x: jax.Array) -> jax.Array:
        """The log2 of x in one instruction."""
        return _float32_ptx("lg2.approx.ftz.f32 $0, $1;", x)

    def reciprocal(self, x: jax.Array) -> jax.Array:
        """1 / x in one instruction."""
        return _float32_ptx("rcp.approx.ftz.f32 $0, $1;", x)

    def divide(self, numerator: jax.Array, denominator: jax.Array) -> jax.Array:
        """The correctly rounded quotient; Triton's own division is approximate."""
        return _float32_ptx("div.rn.f32 $0, $1, $2;", numerator, denominator)

    def narrow(self, x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Converts two float32 values to `dtype` with one instruction."""
        suffix = "bf16x2" if jnp.dtype(dtype) == jnp.bfloat16 else "f16x2"
        [result] = plgpu.elementwise_inline_asm(
            f"cvt.rn.{suffix}.f32 $0, $2, $1;",
            args=[x],
            constraints="=r,f,f",
            pack=2,
            result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, dtype)],
        )
        return result

    def widen(self, x: jax.Array) -> jax.Array:
        """Converts x to float32, each bfloat16 with one instruction."""
        if x.dtype != jnp.bfloat16:
            return x.astype(jnp.float32)
        [result] = plgpu.elementwise_inline_asm(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;",
            args=[x],
            constraints="=&f,=f,r",
            pack=2,
            result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
        )
        return result

    def round_to(self, x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Casts x to `dtype` and back to float32; Triton, unlike XLA, keeps both casts."""
        return x.astype(dtype).astype(jnp.float32)

    def split(self, x: jax.Array, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
        """Float32 x, rounded to `dtype`, and as float32 again, with few conversions."""
        if x.size < 2 * 32 or x.ndim < 2:  # a thread has no pair of elements
            return super().split(x, dtype)
        rounded = self.narrow(x, dtype)
        return rounded, self.widen(rounded)

    def inline_ptx(
        self, assembly: str, *arguments: jax.Array, dtype: jax.typing.DTypeLike
    ) -> jax.Array:
        """Applies PTX to the registers of tiles as Triton's inline assembly."""
        size = arguments[0].dtype.itemsize
        constraints = ",".join(["=r", *["r"] * sum(a.dtype.itemsize // size for a in arguments)])
        [result] = plgpu.elementwise_inline_asm(
            assembly,
            args=arguments,
            constraints=constraints,
            pack=4 // size,
            result_shape_dtypes=[jax.ShapeDtypeStruct(arguments[0].shape, dtype)],
        )
        return result

    def register_column(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Broadcasts the values along rows; each register's first element is the first operand."""
        return jnp.broadcast_to(x[:, None], shape)

    def share_pairs(self, halves: Sequence[jax.Array]) -> jax.Array:
        """Fills an array that the PTX declares, beside Triton's own shared memory."""
        return self.inline_ptx(ptx.share_pairs(len(halves)), *halves, dtype=jnp.int32)


def _float32_ptx(assembly: str, *arguments: jax.Array) -> jax.Array:
    shape = jnp.broadcast_shapes(*(argument.shape for argument in arguments))
    [result] = plgpu.elementwise_inline_asm(
        assembly,
        args=[jnp.broadcast_to(argument, shape) for argument in arguments],
        constraints=",".join(["=f"] + ["f"] * len(arguments)),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.float32)],
    )
    return result
