"""The one module that knows Pallas-Triton; `mosaic` is that of Mosaic GPU.

Kernels reach the backend through the names below, so that replacing it is a change to this
file and to the launchers, not to the kernel mathematics. JAX deprecated the backend in 0.11 and
still ships it in 0.12; its warning is silenced here, where it is caused, and nowhere else.
"""

from __future__ import annotations

import contextlib
import contextvars
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax._src.pallas.triton import lowering
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from mpjax.kernels import manual_axes
from mpjax.kernels.registers import (
    MOST_REGISTERS,
    limit_registers,
    limit_registers_p,
    lower_limit_registers,
)

warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
lowering.register_lowering(limit_registers_p)(lower_limit_registers)

MINIMUM_COMPUTE_CAPABILITY = 8.0  # cp.async, bf16 tensor cores and lop3 arrived with Ampere
FLOAT8_COMPUTE_CAPABILITY = 8.9
EARLY_LAUNCH_CAPABILITY = 9.0

# Of shared memory that one program can have, by compute capability (CUDA programming guide).
SHARED_KIBIBYTES = {8.0: 163, 8.6: 99, 8.7: 163, 8.9: 99, 9.0: 227, 10.0: 227, 10.3: 227}
LEAST_SHARED_KIBIBYTES = 99  # of every GPU since Ampere
PAIR_BYTES = 128 * 16**2 + 1024  # of shared memory, what `share_pairs` takes

load, store = plgpu.load, plgpu.store


class UnsupportedError(ValueError):
    """An implementation was asked for something that it cannot do; the message says what."""


def default_device() -> jax.Device:
    """The device on which arrays are put by default."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined, unused-ignore]
    return device if isinstance(device, jax.Device) else jax.local_devices(backend=device)[0]


def on_gpu() -> bool:
    """Whether arrays are put on a GPU by default."""
    return default_device().platform == "gpu"


def compute_capability() -> float | None:
    """Compute capability of the default device, or None where it is no GPU."""
    return float(default_device().compute_capability) if on_gpu() else None


def multiprocessors() -> int:
    """Streaming multiprocessors of the default device (132, an H200's, where it is no GPU)."""
    return int(default_device().core_count) if on_gpu() else 132


def shared_memory(capability: float) -> int:
    """Bytes of shared memory that one program can have on a GPU of a compute capability."""
    return 1024 * SHARED_KIBIBYTES.get(capability, LEAST_SHARED_KIBIBYTES)


def why_triton_cannot_run() -> str | None:
    """The reason why Triton kernels can't run on the default device, or None if they can."""
    capability = compute_capability()
    if capability is None:
        return f"the default device is {default_device().platform!r}, and kernels need a CUDA GPU"
    if capability < MINIMUM_COMPUTE_CAPABILITY:
        return f"compute capability {capability} is below {MINIMUM_COMPUTE_CAPABILITY}"
    return None


def why_not_float8(capability: float | None = None) -> str | None:
    """The reason why kernels can't hold FP8 values, or None if they can.

    capability: a GPU's; that of the default device unless given.
    """
    capability = capability or compute_capability()
    if capability is None or capability >= FLOAT8_COMPUTE_CAPABILITY:
        return None
    return f"FP8 came with compute capability {FLOAT8_COMPUTE_CAPABILITY}; this is {capability}"


def why_too_large(elements: int) -> str | None:
    """The reason why a kernel can't index an 8-bit array of so many elements, or None if it can.

    Pallas counts 32-bit signed offsets up to 2**32 bytes, which is right for wider elements alone.
    """
    if elements < 2**31:
        return None
    return f"{elements} elements of 8 bits are more than 2**31, which is what offsets can count"


def load_masked(ref: Any, mask: jax.Array | None) -> jax.Array:
    """Loads a tile, of which what is masked out reads as zero.

    mask: of the leading rows, or what broadcasts to the tile. Without one the load has none at all,
        which lets the compiler use its widest copies.
    """
    if mask is None:
        return load(ref)
    if mask.ndim == 1:
        mask = mask.reshape(-1, *[1] * (len(ref.shape) - 1))
    return load(ref, mask=jnp.broadcast_to(mask, ref.shape), other=jnp.zeros((), ref.dtype))


def dot(a: jax.Array, b: jax.Array, *, trans_b: bool = False) -> jax.Array:
    """A [n, k] · b [k, m] (or [m, k]), summed in int32 for int8 operands and in float32 else."""
    sum_dtype = jnp.int32 if a.dtype == jnp.int8 else jnp.float32
    dimensions = (((1,), (1 if trans_b else 0,)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=sum_dtype)


def join(tiles: Sequence[jax.Array]) -> jax.Array:
    """Concatenates tiles [n, k], a power of two of them, along k; in registers, nothing moves."""
    while len(tiles) > 1:
        tiles = [
            jnp.stack(pair, -1).transpose(0, 2, 1).reshape(len(pair[0]), 2 * pair[0].shape[1])
            for pair in zip(tiles[::2], tiles[1::2], strict=True)
        ]
    return tiles[0]


# Of the kernel that is being traced: whether it is to run on a GPU that launches kernels early, and
# how many registers a thread of it may have.
_launches_early = contextvars.ContextVar("launches_early", default=False)
_registers: contextvars.ContextVar[int | None] = contextvars.ContextVar("registers", default=None)


def first_program_id() -> jax.Array:
    """The program's index along the grid's first axis; each kernel asks for it once.

    By the way it limits the kernel's registers, and lets the next kernel be launched as soon as all
    programs of this one have begun: "programmatic dependent launch", compute capability 9.0. XLA
    has each kernel that it launches so wait, before it reads anything, until the one before is
    done: what is saved is a launch's time.
    """
    index = pl.program_id(0)
    if (registers := _registers.get()) is not None:
        index = limit_registers(index, registers)
    if not _launches_early.get():
        return index
    # The index passes through the assembly, which the compiler would leave out otherwise.
    tile = jnp.full((1,), index, jnp.int32)
    assembly = "griddepcontrol.launch_dependents; mov.b32 $0, $1;"
    return inline_ptx(assembly, tile, dtype=jnp.int32).max()


def pallas_call(
    kernel: Callable[..., None],
    *arguments: Any,
    out_shape: Any,
    grid: tuple[int, ...],
    name: str,
    warps: int,
    stages: int,
    interpret: bool,
    aliases: dict[int, int] | None = None,
    registers: int | None = None,
) -> Any:
    """Launches a kernel over whole arrays in global memory.

    The kernel gets a reference for each array in its arguments and outputs, in the same trees, and
    does its own indexing. `aliases` maps an argument to the output that takes over its buffer.
    `registers` is how many a thread of a kernel that asks for `first_program_id` may have; None
    leaves it to the assembler, which keeps room for programs that may never come. With `interpret`,
    the kernel runs as plain JAX on any device. Raises ValueError for more than there are.
    """
    if registers is not None and not 0 < registers <= MOST_REGISTERS:
        raise ValueError(f"{name}: {registers} registers: expected 1 to {MOST_REGISTERS}")

    def run(*references: Any) -> None:
        capability = compute_capability() or 0.0
        early = not interpret and capability >= EARLY_LAUNCH_CAPABILITY
        launch = _launches_early.set(early)
        limit = _registers.set(None if interpret else registers)
        try:
            kernel(*references)
        finally:
            _launches_early.reset(launch)
            _registers.reset(limit)

    arguments = manual_axes.vary_alike(arguments)
    launch = pl.pallas_call(
        run,
        out_shape=manual_axes.varying_like(out_shape, arguments),
        grid=grid,
        input_output_aliases=aliases or {},
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name=name,
    )
    with jax.enable_x64(False):  # kernels count in 32 bits
        return launch(*arguments)


class Decoding(Protocol):
    """How another backend than Triton does what decoders of weights need; the rest is Triton's."""

    has_registers: bool  # to spare, for a table of up to eight entries

    def inline_ptx(
        self, assembly: str, *arguments: jax.Array, dtype: jax.typing.DTypeLike
    ) -> jax.Array:
        """See the function below."""

    def column(self, x: jax.Array) -> jax.Array:
        """See the function below."""

    def registers(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """See the function below."""

    def fill_rows(self, table: Any, bits: int, operand: jnp.dtype) -> tuple[jax.Array, ...]:
        """All pairs of a table's values in shared memory, for `look_up.InSharedRows`."""

    def table_bytes(self, table: Any, bits: int, operand: jnp.dtype) -> tuple[jax.Array, ...]:
        """The bytes of up to eight values, for `look_up.InRegisters`."""


_decoding = contextvars.ContextVar[Decoding | None]("decoding", default=None)


@contextlib.contextmanager
def decoding_with(decoding: Decoding) -> Iterator[None]:
    """Inside, in this thread, decoders are traced for the backend that `decoding` is of."""
    token = _decoding.set(decoding)
    try:
        yield
    finally:
        _decoding.reset(token)


def other_decoding() -> Decoding | None:
    """That of the backend that decoders are traced for, if it is another one than Triton."""
    return _decoding.get()


def column(x: jax.Array) -> jax.Array:
    """A value for each output channel [tile_n] as what broadcasts to a tile of words."""
    decoding = _decoding.get()
    return x[:, None] if decoding is None else decoding.column(x)


def registers(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """32 bits for each output channel [tile_n] as what `inline_ptx` finds beside a tile of words.

    It is the argument's first operand that they are; `shape` is the tile's.
    """
    decoding = _decoding.get()
    return jnp.broadcast_to(x[:, None], shape) if decoding is None else decoding.registers(x, shape)


def inline_ptx(assembly: str, *arguments: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Applies PTX to 32-bit registers of neighbouring elements of the first argument and `dtype`.

    A register holds two 16-bit or four 8-bit elements. An argument of wider elements than the
    first fills as many more operands.
    """
    if (decoding := _decoding.get()) is not None:
        return decoding.inline_ptx(assembly, *arguments, dtype=dtype)
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


def share_pairs(halves: Sequence[jax.Array]) -> jax.Array:
    """Fills shared memory with all pairs of a table's values; its address, int32 [1, 1].

    halves: the table's sixteen values of 16 bits, two in each uint32 [1, 1]. Word i + 16 · j holds
    entry i, and entry j in its upper half. Each of a warp's 32 lanes has a copy of all words, in a
    bank of its own, so that a warp looks up 32 words at a time whichever they are: that of lane l
    is at address + 128 · word + 4 · l.

    The array is apart from what Triton allots. A kernel calls this once, before its loop.
    """
    words = "".join(f" st.shared.b32 [table+{4 * i}], ${i + 1};" for i in range(len(halves)))
    # A lane begins at its own eighth of the 32 copies: lanes write to different banks.
    copies = "".join(
        f"""
        add.u32 place, lane, {16 * eighth};
        and.b32 place, place, 127;
        add.u32 place, place, row;
        st.shared.v4.b32 [place], {{low, low, low, low}};"""
        for eighth in range(8)
    )
    # A whole number of kilobytes leaves Triton's own tiles where `wgmma` can read them.
    assembly = f"""{{
        .shared .align 1024 .b8 pairs[{PAIR_BYTES - 1024}];
        .shared .align 1024 .b8 values[1024];
        .reg .b32 table, lane, pair, threads, row, place, low, high;
        .reg .pred done;
        mov.u32 table, values;{words}
        bar.sync 0;
        mov.u32 lane, %laneid;
        shl.b32 lane, lane, 4;
        mov.u32 pair, %tid.x;
        mov.u32 threads, %ntid.x;
    next:
        setp.ge.u32 done, pair, 256;
        @done bra end;
        and.b32 place, pair, 15;
        mad.lo.u32 place, place, 2, table;
        ld.shared.u16 low, [place];
        shr.u32 place, pair, 4;
        and.b32 place, place, 15;
        mad.lo.u32 place, place, 2, table;
        ld.shared.u16 high, [place];
        prmt.b32 low, low, high, 0x5410;
        mov.u32 row, pairs;
        mad.lo.u32 row, pair, 128, row;{copies}
        add.u32 pair, pair, threads;
        bra next;
    end:
        bar.sync 0;
        mov.u32 $0, pairs;
    }}"""
    return inline_ptx(assembly, *halves, dtype=jnp.int32)


def multiply_add(factor: jax.Array, other: jax.Array, addend: jax.Array) -> jax.Array:
    """Factor · other + addend in float32, as the one instruction that the compiler won't make."""
    return _float32_ptx("fma.rn.f32 $0, $1, $2, $3;", factor, other, addend)


def divide(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """float32 division, correctly rounded inside a kernel, where Triton's own is approximate."""
    return _float32_ptx("div.rn.f32 $0, $1, $2;", numerator, denominator)


def exp2(x: jax.Array) -> jax.Array:
    """2**x in float32, as one instruction: to two units in the last place, subnormals to zero."""
    return _float32_ptx("ex2.approx.ftz.f32 $0, $1;", x)


def log2(x: jax.Array) -> jax.Array:
    """The log2 of x in float32, as one instruction: to 2**-22, or so much of it; no subnormals."""
    return _float32_ptx("lg2.approx.ftz.f32 $0, $1;", x)


def reciprocal(x: jax.Array) -> jax.Array:
    """1 / x in float32, as one instruction: to one unit in the last place, subnormals to zero."""
    return _float32_ptx("rcp.approx.ftz.f32 $0, $1;", x)


def narrow(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """float32 in bfloat16 or float16, two in one instruction."""
    suffix = "bf16x2" if jnp.dtype(dtype) == jnp.bfloat16 else "f16x2"
    [result] = plgpu.elementwise_inline_asm(
        f"cvt.rn.{suffix}.f32 $0, $2, $1;",
        args=[x],
        constraints="=r,f,f",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, dtype)],
    )
    return result


def widen(x: jax.Array) -> jax.Array:
    """bfloat16 or float16 in float32; of bfloat16, each as one instruction."""
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
