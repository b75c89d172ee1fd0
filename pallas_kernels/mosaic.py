"""All that is known of Pallas' Mosaic GPU, but for what `mosaic_decoding` knows.

It has what Triton hides: warpgroups with tasks of their own, copies that they wait for, and `wgmma`
whose operand is in registers and which runs on while the next one is made. Kernels reach it through
the names below, as those of Triton go through `backend`, and decode with the same functions.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mosaic_gpu
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.config import CHANNELS

SWIZZLED_BYTES = 128  # of a row of a tile that `wgmma` reads, at most
COPYING_REGISTERS = 32  # of a thread that only begins copies
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


def why_slow(version: tuple[int, ...] = jax.__version_info__) -> str | None:
    """Why threads may not get the registers that they take below; None if they do.

    version: of JAX. Since 0.12 nvJitLink compiles them, each as one compilation unit of several,
        where `setmaxnreg` is ignored, and sums are spilled (docs/compiler.md, Warpgroups).
    """
    if version < (0, 12):
        return None
    return "slower with JAX 0.12, whose compiler ignores `setmaxnreg`: install a jax before it"


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


def load_row(ref: Any, *, interpret: bool) -> jax.Array:
    """Values [CHANNELS], one for each of a tile's channels, in the threads that have these.

    Of any memory: each thread loads its own.
    """
    return _load(ref, _layouts.WGMMA.reduce(1), interpret, optimized=False)


def load_column(ref: Any, *, interpret: bool) -> jax.Array:
    """Values [rows] as sums [CHANNELS, rows] of a warpgroup: those of a row are alike."""
    values = _load(ref, _layouts.WGMMA.reduce(0), interpret, optimized=False)
    return jax.lax.broadcast_in_dim(values, (CHANNELS, *values.shape), (1,))


def load(ref: Any, *, interpret: bool) -> jax.Array:
    """A tile [CHANNELS, columns] in the registers, as `wgmma` has operand and sums."""
    return _load(ref, operand_layout(ref.dtype), interpret)


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
    return _layouts.WGMMA_8BIT if jnp.dtype(dtype).itemsize == 1 else _layouts.WGMMA


def join(tiles: Sequence[jax.Array], *, interpret: bool) -> jax.Array:
    """Operands [CHANNELS, width] beside each other as one: no register is moved."""
    if len(tiles) == 1:
        return tiles[0]
    if interpret:
        return jnp.concatenate(tiles, 1)
    dtype, width = tiles[0].dtype, sum(tile.shape[1] for tile in tiles)
    layout = operand_layout(dtype)
    beside = plgpu.inline_mgpu(
        arg_types=(layout,) * len(tiles),
        return_type=plgpu.ShapeDtypeStruct((CHANNELS, width), dtype, layout=layout),
    )(_beside)
    result: jax.Array = beside(*tiles)
    return result


def _beside(context: Any, *tiles: mosaic_gpu.FragmentedArray) -> mosaic_gpu.FragmentedArray:
    registers = np.concatenate([tile.registers for tile in tiles], 1)
    return mosaic_gpu.FragmentedArray(
        _registers=registers, _layout=tiles[0].layout, _is_signed=tiles[0].is_signed
    )


def zeros(shape: tuple[int, int], dtype: jax.typing.DTypeLike, *, interpret: bool) -> jax.Array:
    """Sums [CHANNELS, rows] of nothing, in the registers of a warpgroup."""
    tile = jnp.zeros(shape, dtype)
    return tile if interpret else plgpu.layout_cast(tile, _layouts.WGMMA)


def accumulate(
    rows: Sequence[int],
    body: Callable[..., Any],
    scratch: Any | None,
    dtype: jax.typing.DTypeLike,
) -> Any:
    """Runs `body` with sums [CHANNELS, n] of 0 for each n of `rows`, which `multiply` adds to.

    They are in the registers of a warpgroup.

    scratch: [CHANNELS, all rows], where they are instead if a kernel is interpreted, else None.
    """
    if scratch is None:
        sums = [plgpu.WGMMAAccumulatorRef((CHANNELS, n), jnp.dtype(dtype)) for n in rows]
        return pl.run_scoped(body, *sums)
    scratch[...] = jnp.zeros((CHANNELS, sum(rows)), dtype)
    ends = itertools.accumulate(rows)
    return body(*(scratch.at[:, pl.ds(end - n, n)] for end, n in zip(ends, rows, strict=True)))


def multiply(sums: Any, operand: Any, x: Any, *, interpret: bool) -> None:
    """Begins to add operand [CHANNELS, width] · x.T to the sums; x is a tile in shared memory.

    operand: in registers, or a tile in shared memory as well.
    """
    if interpret:
        sums[...] += jnp.dot(operand[...], x[...].T, preferred_element_type=sums.dtype)
        return
    plgpu.wgmma(sums, operand, x.transpose((1, 0)))


class Product(NamedTuple):
    """A sum of operands [CHANNELS, width] · x.T."""

    operands: Sequence[Callable[[], jax.Array]]  # what makes each of them
    tiles: Sequence[Any]  # of x, in shared memory


Add = Callable[[jax.Array, jax.Array, int], jax.Array]  # to sums, a product, and its number


def add_products(
    sums: jax.Array, products: Sequence[Product], add: Add, *, now: bool, scratch: Any
) -> jax.Array:
    """Adds products to sums [CHANNELS, rows]. Each operand is made while the last is multiplied.

    now: each warp multiplies for itself (`mma.sync`). There is nothing to wait for, so that the
        compiler can mix that with anything, but the instructions grow with the rows.
    scratch: see `accumulate`.
    """
    interpret, rows = scratch is not None, sums.shape[1]

    def term(product: Product) -> jax.Array:
        if interpret or not now:
            begin = functools.partial(_begin, product, interpret=interpret)
            result: jax.Array = accumulate((rows,), begin, scratch, sums.dtype)
            return result
        return _multiplied_now(product, zeros((CHANNELS, rows), sums.dtype, interpret=False))

    for number, product in enumerate(products):
        sums = add(sums, term(product), number)
    return sums


def add_in_turn(sums: jax.Array, products: Sequence[Product], add: Add, **_: Any) -> jax.Array:
    """As `add_products`; each is added while the next one is at work, in other registers."""

    def go_on(number: int, sums: jax.Array, before: Any) -> jax.Array:
        product = products[number]
        # What is read must be done: what comes first needs the weights, and not the sums.
        first = product.operands[0]()
        if before is not None:
            sums = add(sums, before[...], number - 1)

        def begin(accumulator: Any) -> jax.Array:
            operands = [lambda: first, *product.operands[1:]]
            _multiply_all(accumulator, Product(operands, product.tiles), interpret=False)
            if number + 1 < len(products):
                return go_on(number + 1, sums, accumulator)
            return add(sums, accumulator[...], number)

        result: jax.Array = accumulate(sums.shape[1:], begin, None, sums.dtype)
        return result

    return go_on(0, sums, None)


def _multiply_all(sums: Any, product: Product, *, interpret: bool) -> None:
    for operand, x in zip(product.operands, product.tiles, strict=True):
        multiply(sums, operand(), x, interpret=interpret)


def _begin(product: Product, sums: Any, *, interpret: bool) -> jax.Array:
    _multiply_all(sums, product, interpret=interpret)
    result: jax.Array = sums[...]
    return result


def _multiplied_now(product: Product, sums: jax.Array) -> jax.Array:
    x_dtype = product.tiles[0].dtype
    rows = _mma_rows(x_dtype)
    run = plgpu.inline_mgpu(
        arg_types=(_layouts.WGMMA, operand_layout(x_dtype), rows),
        return_type=plgpu.ShapeDtypeStruct(sums.shape, sums.dtype, layout=_layouts.WGMMA),
    )(_mma)
    for operand, x in zip(product.operands, product.tiles, strict=True):
        sums = run(sums, operand(), _load(x, rows, interpret=False))
    return sums


def _mma_rows(dtype: jnp.dtype) -> Any:
    """The layout of rows [8 · n, channels], alike in all warps, as columns for `_mma`."""
    elements = 4 // dtype.itemsize  # of a register
    tiling = fragmented_array.Tiling(((8, 4 * elements), (elements,)))
    warps = fragmented_array.Replicated(4)
    return _layouts.TILED(tiling, warp_dims=(warps,), lane_dims=(-3, -2), vector_dim=-1)


def _mma(
    context: Any,
    sums: mosaic_gpu.FragmentedArray,
    operand: mosaic_gpu.FragmentedArray,
    rows: mosaic_gpu.FragmentedArray,
) -> mosaic_gpu.FragmentedArray:
    # Both lie in registers as `mma.sync` takes them, but in another order, or by another name.
    layouts = mosaic_gpu.MMALayouts(operand.mlir_dtype)
    count, width = rows.shape
    columns = rows.registers.reshape(count // 8, -1, 2).transpose(1, 0, 2)
    left, right = (
        mosaic_gpu.FragmentedArray(
            _registers=registers.reshape(layout.registers_shape(shape)),
            _layout=layout,
            _is_signed=operand.is_signed,
        )
        for registers, layout, shape in (
            (operand.registers, layouts.lhs, operand.shape),
            (columns, layouts.rhs, (width, count)),
        )
    )
    return mosaic_gpu.mma(sums, left, right)


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
    """Waits until all tiles of this warpgroup have been read from shared memory."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
