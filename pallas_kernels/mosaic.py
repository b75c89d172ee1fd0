"""The one module that knows Pallas' Mosaic GPU.

It has what Triton hides: warpgroups with tasks of their own, copies that they wait for, and `wgmma`
whose operand is in registers and which runs on while the next one is made. Kernels reach it through
the names below, as those of Triton go through `backend`, and decode with the same functions.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mosaic_gpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_kernels.gemm.config import CHANNELS

SHARED_BYTES = 227 * 1024  # that a program can have, compute capability 9.0
SWIZZLED_BYTES = 128  # of a row of a tile that `wgmma` reads, at most
BARRIER_BYTES = 2048  # of shared memory at most, with what the start of each array is rounded up by
COPYING_REGISTERS = 40  # of a thread that only begins copies
_REGISTERS = 65536 // 128  # of a multiprocessor, for each thread of a warpgroup
_MOST_REGISTERS = 248  # of a thread, in whole eights

Barrier = plgpu.Barrier
wait = plgpu.barrier_wait
arrive = plgpu.barrier_arrive
copy_in = plgpu.copy_gmem_to_smem
wait_for_products = plgpu.wgmma_wait

_layouts = plgpu.Layout
# Until JAX 0.10 an index comes apart from its reference.
_index = inspect.signature(plgpu.load).parameters.get("idx")
_is_old = _index is not None and _index.default is inspect.Parameter.empty


def registers_per_thread(warpgroups: int) -> int:
    """Registers that a thread can have where so many warpgroups compute, and another one copies.

    All begin with as many, and the one that copies gives most of its own away.
    """
    each = _REGISTERS // (warpgroups + 1) // 8 * 8
    return min(
        _MOST_REGISTERS, (each * (warpgroups + 1) - COPYING_REGISTERS) // warpgroups // 8 * 8
    )


def shared(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Any:
    """Tiles [..., rows, columns] in shared memory, swizzled as `wgmma` reads them."""
    size = jnp.dtype(dtype).itemsize
    row = min(SWIZZLED_BYTES, shape[-1] * size)
    tiling: Any = plgpu.TilingTransform  # which JAX declares as abstract
    swizzle: Any = plgpu.SwizzleTransform
    return plgpu.SMEM(shape, dtype, transforms=(tiling((8, row // size)), swizzle(row)))


def shared_rows(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Any:
    """Rows in shared memory, as they lie in global memory."""
    return plgpu.SMEM(shape, dtype)


def launch(
    kernel: Callable[..., None],
    *arguments: jax.Array,
    out_shape: jax.ShapeDtypeStruct,
    grid: Mapping[str, int],
    warpgroups: int,
    scratch: Mapping[str, Any],
    name: str,
    interpret: bool,
) -> jax.Array:
    """Runs a kernel, in each program once in each of `warpgroups` and in one more, which copies.

    The kernel gets a reference for each argument and the output, and those of `scratch` by name; it
    asks for the axis "warpgroup" which one it is in. With `interpret` it runs as plain JAX.
    """
    parameters = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    options: dict[str, Any] = {"compiler_params": parameters}
    if interpret:
        options = {"interpret": _interpreter()}
    run: Any = plgpu.kernel(
        kernel,
        out_type=out_shape,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=dict(scratch),
        kernel_name=name,
        **options,
    )
    result: jax.Array = run(*arguments)
    # Under `shard_map`, Pallas forgets which axes of a mesh the arguments differ along.
    varying = frozenset().union(*(_varying(argument) for argument in arguments))
    return jax.lax.pcast(result, tuple(varying), to="varying") if varying else result


def _varying(array: jax.Array) -> frozenset[str]:
    manual: Any = jax.typeof(array)
    return frozenset(manual.manual_axis_type.varying)


def _interpreter() -> Any:
    # It has no public name before JAX 0.11.
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    # What a copy reads outside of an array is never stored.
    return InterpretGPUParams(out_of_bounds_reads="uninitialized")


def load(ref: Any, *, interpret: bool) -> jax.Array:
    """A tile [CHANNELS, columns] of 16 bits in the registers, as an operand of `wgmma`."""
    return _load(ref, _layouts.WGMMA, interpret)


def load_row(ref: Any, *, interpret: bool) -> jax.Array:
    """Values [CHANNELS], one for each of a tile's channels, in the threads that have these."""
    return _load(ref, _layouts.WGMMA.reduce(1), interpret)


def _load(ref: Any, layout: Any, interpret: bool) -> jax.Array:
    if interpret:
        values: jax.Array = ref[...]
        return values
    read: Any = plgpu.load
    values = read(ref, (), layout=layout) if _is_old else read(ref, layout=layout)
    return values


def accumulate(
    shape: tuple[int, int], body: Callable[[Any], jax.Array], scratch: Any | None
) -> jax.Array:
    """Runs `body` with sums of 0, which `multiply` adds to, in the registers of a warpgroup.

    scratch: where they are instead if a kernel is interpreted, else None.
    """
    if scratch is None:
        result: jax.Array = pl.run_scoped(body, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
        return result
    scratch[...] = jnp.zeros(shape, jnp.float32)
    return body(scratch)


def multiply(sums: Any, operand: jax.Array, x: Any, *, interpret: bool) -> None:
    """Begins to add operand [CHANNELS, width] · x.T to the sums; x is a tile in shared memory."""
    if interpret:
        sums[...] += jnp.dot(operand, x[...].T, preferred_element_type=jnp.float32)
        return
    plgpu.wgmma(sums, operand, x.transpose((1, 0)))


def store_transposed(ref: Any, tile: jax.Array, *, interpret: bool) -> None:
    """Writes sums [channels, rows] to a tile [rows, channels] in shared memory."""
    if interpret:
        ref[...] = tile.T
        return
    ref.transpose((1, 0))[...] = plgpu.layout_cast(tile, _layouts.WGMMA_TRANSPOSED)


def give_registers() -> None:
    """In the warpgroup that copies, first: leaves registers to those that compute."""
    plgpu.set_max_registers(COPYING_REGISTERS, action="decrease")


def take_registers(warpgroups: int) -> None:
    """In each of the warpgroups that compute, first: takes what the other one leaves."""
    plgpu.set_max_registers(registers_per_thread(warpgroups), action="increase")


def copy_out(tile: Any, target: Any) -> None:
    """Begins to write a tile in shared memory, which was stored to before, to global memory.

    What of it lies outside of the array is left out.
    """
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, target)


def wait_for_stores() -> None:
    """Waits until all tiles of this warpgroup have been written."""
    plgpu.wait_smem_to_gmem(0)


class WgmmaDecoding:
    """Decoding in the registers of `wgmma`'s operand, for tiles [CHANNELS, width]."""

    def __init__(self, width: int) -> None:
        self.shape = CHANNELS, width

    def column(self, x: jax.Array) -> jax.Array:
        """A value for each channel [CHANNELS] as a tile: in a thread's registers they are alike."""
        return jax.lax.broadcast_in_dim(x, self.shape, (0,))

    def inline_ptx(
        self, assembly: str, *arguments: jax.Array, dtype: jax.typing.DTypeLike
    ) -> jax.Array:
        """PTX on pairs of elements of 16 bits; see `backend.inline_ptx`."""
        apply = plgpu.inline_mgpu(
            arg_types=(_layouts.WGMMA,) * len(arguments),
            return_type=plgpu.ShapeDtypeStruct(self.shape, jnp.dtype(dtype), layout=_layouts.WGMMA),
        )(functools.partial(_apply_ptx, assembly, jnp.dtype(dtype)))
        result: jax.Array = apply(*arguments)
        return result


def _apply_ptx(
    assembly: str,
    dtype: jnp.dtype,
    context: Any,
    *tiles: mosaic_gpu.FragmentedArray,
) -> mosaic_gpu.FragmentedArray:
    word = ir.IntegerType.get_signless(32)
    words = ir.VectorType.get((1,), word)
    pair = ir.VectorType.get((2,), mosaic_gpu.utils.dtype_to_ir_type(dtype))
    constraints = ",".join(["=r"] + ["r"] * len(tiles))

    def apply(*values: Any) -> ir.Value:
        operands = [vector.extract(vector.bitcast(words, value), [], [0]) for value in values]
        result: Any = llvm.inline_asm(
            word, operands, assembly, constraints, has_side_effects=False, asm_dialect=0
        )
        return vector.bitcast(pair, vector.broadcast(words, result))

    results = np.empty_like(tiles[0].registers)
    for index in np.ndindex(results.shape):
        results[index] = apply(*(tile.registers[index] for tile in tiles))
    is_signed = mosaic_gpu.utils.is_signed(dtype)
    return mosaic_gpu.FragmentedArray(
        _registers=results, _layout=tiles[0].layout, _is_signed=is_signed
    )
