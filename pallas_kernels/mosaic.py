"""All that is known of Pallas' Mosaic GPU, but for decoding (`mosaic_decoding`) and products.

It has what Triton hides: warpgroups with tasks of their own, copies that they wait for, and `wgmma`
whose operand is in registers and which runs on while the next one is made. Kernels reach it through
the names below, as those of Triton go through `backend`, and decode with the same functions.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from mpjax.kernels.gemm.config import CHANNELS
from mpjax.kernels.manual_axes import vary_alike

SWIZZLED_BYTES = 128  # of a row of a tile that `wgmma` reads, at most
COPYING_REGISTERS = 32  # of a thread that only begins copies
_REGISTERS = 65536 // 128  # of a multiprocessor, for each thread of a warpgroup
_MOST_REGISTERS = 248  # of a thread, in whole eights

Barrier = plgpu.Barrier
wait = plgpu.barrier_wait
arrive = plgpu.barrier_arrive
copy_in = plgpu.copy_gmem_to_smem

layouts = plgpu.Layout
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


def why_slow(version: tuple[int, ...] = jax.__version_info__) -> str | None:
    """Why threads may not get the registers that they take below; None if they do.

    version: of JAX. Since 0.12 nvJitLink compiles kernels, each as one compilation unit of several,
        where `setmaxnreg` is ignored, and sums are spilled (docs/compiler.md, Warpgroups).
    """
    if version < (0, 12):
        return None
    return (
        "since JAX 0.12, threads may not get the registers that they ask for: install 'jax<0.12', "
        "as mpjax's extras cuda12 and cuda13 do"
    )


def shared(
    shape: tuple[int, ...], dtype: jax.typing.DTypeLike, *, columns: int | None = None
) -> Any:
    """Tiles [..., rows, columns] in shared memory, swizzled as `wgmma` reads them.

    columns: of a part that is read at a time; all unless given.
    """
    size = jnp.dtype(dtype).itemsize
    row = math.gcd(SWIZZLED_BYTES, (columns or shape[-1]) * size)
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
    cluster: Mapping[str, int] | None = None,
) -> jax.Array:
    """Runs a kernel, in each program once in each of `warpgroups` and in one more, which copies.

    The kernel gets a reference for each argument and the output, and those of `scratch` by name; it
    asks for the axis "warpgroup" which one it is in. With `interpret` it runs as plain JAX.

    cluster: axes beside those of the grid, whose programs run at the same time, and can write to
        each other's shared memory. Not with `interpret`.
    """
    cluster = cluster or {}
    parameters = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    options: dict[str, Any] = {"compiler_params": parameters}
    if interpret:
        options = {"interpret": _interpreter()}
    run: Any = plgpu.kernel(
        kernel,
        out_type=out_shape,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        cluster=tuple(cluster.values()),
        cluster_names=tuple(cluster),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=dict(scratch),
        kernel_name=name,
        **options,
    )
    with jax.enable_x64(False):  # kernels count in 32 bits
        result: jax.Array = run(*arguments)
    # Under `shard_map`, Mosaic forgets which axes of a mesh the arguments vary along.
    return vary_alike((result, *arguments))[0]


def _interpreter() -> Any:
    # It has no public name before JAX 0.11.
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    # What a copy reads outside of an array is never stored.
    return InterpretGPUParams(out_of_bounds_reads="uninitialized")


def load_row(ref: Any, *, interpret: bool) -> jax.Array:
    """Values [CHANNELS], one for each of a tile's channels, in the threads that have these.

    Of any memory: each thread loads its own.
    """
    return _load(ref, layouts.WGMMA.reduce(1), interpret, optimized=False)


def load_column(ref: Any, *, interpret: bool) -> jax.Array:
    """Values [rows] as sums [CHANNELS, rows] of a warpgroup: those of a row are alike."""
    values = _load(ref, layouts.WGMMA.reduce(0), interpret, optimized=False)
    return jax.lax.broadcast_in_dim(values, (CHANNELS, *values.shape), (1,))


def load(ref: Any, *, interpret: bool, layout: Any = None) -> jax.Array:
    """A tile [CHANNELS, columns] in registers, as `wgmma` has operand and sums; or in `layout`."""
    return _load(ref, layout or operand_layout(ref.dtype), interpret)


def _load(ref: Any, layout: Any, interpret: bool, *, optimized: bool = True) -> jax.Array:
    if interpret:
        values: jax.Array = ref[...]
        return values
    read: Any = plgpu.load
    index = ((),) if _is_old else ()
    values = read(ref, *index, layout=layout, optimized=optimized)
    return values


def operand_layout(dtype: jax.typing.DTypeLike) -> Any:
    """How a tile [CHANNELS, columns] lies in registers: a thread's are four bytes of a channel."""
    return layouts.WGMMA_8BIT if jnp.dtype(dtype).itemsize == 1 else layouts.WGMMA


def zeros(shape: tuple[int, int], dtype: jax.typing.DTypeLike, *, interpret: bool) -> jax.Array:
    """Sums [CHANNELS, rows] of nothing, in the registers of a warpgroup."""
    tile = jnp.zeros(shape, dtype)
    return tile if interpret else plgpu.layout_cast(tile, layouts.WGMMA)


def send(
    tile: jax.Array, ref: Any, received: Any, *, axis: str | None = None, program: int = 0
) -> None:
    """Writes sums [CHANNELS, rows] to shared memory, and arrives at a barrier when they are there.

    axis: of a cluster, of whose `program` memory and barrier are meant; without it, this one's.
    """
    if axis is None:
        ref[...] = tile
        arrive(received)
    else:
        has_index = bool(getattr(received, "transforms", ()))
        assert not has_index, "JAX 0.11 counts the index of another program's barrier twice"
        index = jnp.int32(program)
        plgpu.async_store_smem(tile, ref, received, cluster_idx=index, cluster_dim=axis)


def store_transposed(ref: Any, tile: jax.Array, *, interpret: bool) -> None:
    """Writes sums [channels, rows] to a tile [rows, channels] in shared memory."""
    if interpret:
        ref[...] = tile.T
        return
    ref.transpose((1, 0))[...] = plgpu.layout_cast(tile, layouts.WGMMA_TRANSPOSED)


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
    """Waits until all tiles of this warpgroup have been read from shared memory."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
