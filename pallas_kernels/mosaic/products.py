"""Products of a warpgroup in Mosaic GPU: asynchronous ones by `wgmma`, or by warps' `mma.sync`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mosaic_gpu
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu

from mpjax.kernels.mosaic import WARPGROUP_OUTPUTS, memory
from mpjax.kernels.target import current_target

wait_for_products = plgpu.wgmma_wait


def accumulate(
    rows: Sequence[int],
    body: Callable[..., Any],
    scratch: Any | None,
    dtype: jax.typing.DTypeLike,
) -> Any:
    """Runs `body` with references to zeroed sums [64, n], one for each n of `rows`.

    `multiply` adds to the sums, which are in registers of the warpgroup. Returns the result of
    `body`.

    scratch: None; in interpret mode, a reference [64, sum of rows] that contains the sums instead.
    """
    if scratch is None:
        sums = [plgpu.WGMMAAccumulatorRef((WARPGROUP_OUTPUTS, n), jnp.dtype(dtype)) for n in rows]
        return pl.run_scoped(body, *sums)
    scratch[...] = jnp.zeros((WARPGROUP_OUTPUTS, sum(rows)), dtype)
    ends = itertools.accumulate(rows)
    return body(*(scratch.at[:, pl.ds(end - n, n)] for end, n in zip(ends, rows, strict=True)))


def accumulate_from(
    start: jax.Array, body: Callable[[Any], None], scratch: Any | None
) -> jax.Array:
    """The sums after `body`, which gets a reference to sums [64, rows] that begin with `start`.

    `body` must wait for the products that it begins. scratch: as for `accumulate`.
    """
    if scratch is None:
        result: jax.Array = pl.run_state(body)(plgpu.WGMMAAccumulatorRef.init(start))
        return result
    scratch[...] = start
    body(scratch)
    final: jax.Array = scratch[...]
    return final


class Transposed(NamedTuple):
    """An operand that is a tile [width, 64] of 16 bits in shared memory."""

    tile: Any


def multiply(sums: Any, operand: Any, x: Any) -> None:
    """Begins to add operand [64, width] · x.T to sums [64, rows].

    operand: in registers, or a tile in shared memory, or a Transposed tile.
    x: a tile [rows, width] in shared memory.
    """
    if current_target().is_interpreted:
        weights = operand.tile[...].T if isinstance(operand, Transposed) else operand[...]
        sums[...] += jnp.dot(weights, x[...].T, preferred_element_type=sums.dtype)
        return
    if isinstance(operand, Transposed):
        operand = operand.tile.transpose((1, 0))
    plgpu.wgmma(sums, operand, x.transpose((1, 0)))


def join(operands: Sequence[jax.Array]) -> jax.Array:
    """Concatenates operands [64, width] along their width, without moving registers."""
    if len(operands) == 1:
        return operands[0]
    if current_target().is_interpreted:
        return jnp.concatenate(operands, 1)
    dtype, width = operands[0].dtype, sum(operand.shape[1] for operand in operands)
    layout = memory.operand_layout(dtype)
    concatenate = plgpu.inline_mgpu(
        arg_types=(layout,) * len(operands),
        return_type=plgpu.ShapeDtypeStruct((WARPGROUP_OUTPUTS, width), dtype, layout=layout),
    )(_concatenate)
    result: jax.Array = concatenate(*operands)
    return result


def _concatenate(context: Any, *operands: mosaic_gpu.FragmentedArray) -> mosaic_gpu.FragmentedArray:
    registers = np.concatenate([operand.registers for operand in operands], 1)
    first = operands[0]
    return mosaic_gpu.FragmentedArray(
        _registers=registers, _layout=first.layout, _is_signed=first.is_signed
    )


class Product(NamedTuple):
    """The sum over i of operands[i] [64, width] · tiles[i].T, which is [64, rows]."""

    operands: Sequence[Callable[[], jax.Array]]  # functions that decode an operand
    tiles: Sequence[Any]  # tiles of x [rows, width] in shared memory


# Adds a product [64, rows] to sums, given the sums, the product and its index.
Add = Callable[[jax.Array, jax.Array, int], jax.Array]


def add_products(
    sums: jax.Array, products: Sequence[Product], add: Add, *, mma_sync: bool, scratch: Any
) -> jax.Array:
    """Adds products to sums [64, rows]; operands are decoded while the previous one is multiplied.

    mma_sync: whether warps multiply with `mma.sync` instead of `wgmma`. It is synchronous, so the
        compiler can interleave it with other instructions, but the number of instructions grows
        with the rows.
    scratch: see `accumulate`.
    """
    mma_sync = mma_sync and not current_target().is_interpreted

    def term(product: Product) -> jax.Array:
        if mma_sync:
            return _multiply_by_mma_sync(product, memory.zeros(sums.shape, sums.dtype))

        def begin(accumulator: Any) -> Any:
            _multiply_all(accumulator, product)
            return accumulator[...]

        result: jax.Array = accumulate(sums.shape[1:], begin, scratch, sums.dtype)
        return result

    for number, product in enumerate(products):
        sums = add(sums, term(product), number)
    return sums


def add_products_overlapped(sums: jax.Array, products: Sequence[Product], add: Add) -> jax.Array:
    """Adds products to sums [64, rows] by `wgmma`, each while the next one is multiplied.

    Not for interpret mode.
    """

    def go_on(number: int, sums: jax.Array, before: Any) -> jax.Array:
        product = products[number]
        first = product.operands[0]()  # decoded while the previous product is multiplied
        if before is not None:
            # Reading a product waits for all products that have begun. So it is read before the
            # next one begins; the compiler moves the addition after that.
            sums = add(sums, before[...], number - 1)

        def begin(accumulator: Any) -> jax.Array:
            operands = [lambda: first, *product.operands[1:]]
            _multiply_all(accumulator, Product(operands, product.tiles))
            if number + 1 < len(products):
                return go_on(number + 1, sums, accumulator)
            return add(sums, accumulator[...], number)

        result: jax.Array = accumulate(sums.shape[1:], begin, None, sums.dtype)
        return result

    return go_on(0, sums, None)


def _multiply_all(sums: Any, product: Product) -> None:
    for operand, x in zip(product.operands, product.tiles, strict=True):
        multiply(sums, operand(), x)


def _multiply_by_mma_sync(product: Product, sums: jax.Array) -> jax.Array:
    x_dtype = product.tiles[0].dtype
    rows = _mma_rows(x_dtype)
    run = plgpu.inline_mgpu(
        arg_types=(memory.layouts.WGMMA, memory.operand_layout(x_dtype), rows),
        return_type=plgpu.ShapeDtypeStruct(sums.shape, sums.dtype, layout=memory.layouts.WGMMA),
    )(_mma)
    for operand, x in zip(product.operands, product.tiles, strict=True):
        sums = run(sums, operand(), memory.load(x, layout=rows))
    return sums


def _mma_rows(dtype: jnp.dtype) -> Any:
    """The layout of x's rows [8 · n, width] for `_mma`, replicated in all four warps."""
    elements = 4 // dtype.itemsize  # elements of a register
    tiling = fragmented_array.Tiling(((8, 4 * elements), (elements,)))
    warps = fragmented_array.Replicated(4)
    return memory.layouts.TILED(tiling, warp_dims=(warps,), lane_dims=(-3, -2), vector_dim=-1)


def _mma(
    context: Any,
    sums: mosaic_gpu.FragmentedArray,
    operand: mosaic_gpu.FragmentedArray,
    rows: mosaic_gpu.FragmentedArray,
) -> mosaic_gpu.FragmentedArray:
    # Each thread already has the values that `mma.sync` takes from it. Only the order of its
    # registers, and the name of the layout, differ.
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
