"""Products of a warpgroup in Pallas' Mosaic GPU: waited for, or by each warp for itself."""

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
    """Runs `body` with sums [64, n] of 0 for each n of `rows`, which `multiply` adds to.

    They are in the registers of a warpgroup.

    scratch: [64, all rows], where they are instead if a kernel is interpreted, else None.
    """
    if scratch is None:
        sums = [plgpu.WGMMAAccumulatorRef((WARPGROUP_OUTPUTS, n), jnp.dtype(dtype)) for n in rows]
        return pl.run_scoped(body, *sums)
    scratch[...] = jnp.zeros((WARPGROUP_OUTPUTS, sum(rows)), dtype)
    ends = itertools.accumulate(rows)
    return body(*(scratch.at[:, pl.ds(end - n, n)] for end, n in zip(ends, rows, strict=True)))


def multiply(sums: Any, operand: Any, x: Any) -> None:
    """Begins to add operand [64, width] · x.T to the sums; x is a tile in shared memory.

    operand: in registers, or a tile in shared memory as well.
    """
    if current_target().is_interpreted:
        sums[...] += jnp.dot(operand[...], x[...].T, preferred_element_type=sums.dtype)
        return
    plgpu.wgmma(sums, operand, x.transpose((1, 0)))


def join(operands: Sequence[jax.Array]) -> jax.Array:
    """Operands [64, width] beside each other as one: no register is moved."""
    if len(operands) == 1:
        return operands[0]
    if current_target().is_interpreted:
        return jnp.concatenate(operands, 1)
    dtype, width = operands[0].dtype, sum(operand.shape[1] for operand in operands)
    layout = memory.operand_layout(dtype)
    beside = plgpu.inline_mgpu(
        arg_types=(layout,) * len(operands),
        return_type=plgpu.ShapeDtypeStruct((WARPGROUP_OUTPUTS, width), dtype, layout=layout),
    )(_beside)
    result: jax.Array = beside(*operands)
    return result


def _beside(context: Any, *operands: mosaic_gpu.FragmentedArray) -> mosaic_gpu.FragmentedArray:
    registers = np.concatenate([operand.registers for operand in operands], 1)
    first = operands[0]
    return mosaic_gpu.FragmentedArray(
        _registers=registers, _layout=first.layout, _is_signed=first.is_signed
    )


class Product(NamedTuple):
    """A sum of operands [64, width] · x.T."""

    operands: Sequence[Callable[[], jax.Array]]  # what makes each of them
    tiles: Sequence[Any]  # of x, in shared memory


Add = Callable[[jax.Array, jax.Array, int], jax.Array]  # to sums, a product, and its number


def add_products(
    sums: jax.Array, products: Sequence[Product], add: Add, *, now: bool, scratch: Any
) -> jax.Array:
    """Adds products to sums [64, rows]. Each operand is made while the last is multiplied.

    now: each warp multiplies for itself (`mma.sync`). There is nothing to wait for, so that the
        compiler can mix that with anything, but the instructions grow with the rows.
    scratch: see `accumulate`.
    """
    now = now and not current_target().is_interpreted

    def term(product: Product) -> jax.Array:
        if now:
            nothing = memory.zeros(sums.shape, sums.dtype)
            return _multiplied_now(product, nothing)

        def begin(accumulator: Any) -> Any:
            _multiply_all(accumulator, product)
            return accumulator[...]

        result: jax.Array = accumulate(sums.shape[1:], begin, scratch, sums.dtype)
        return result

    for number, product in enumerate(products):
        sums = add(sums, term(product), number)
    return sums


def add_in_turn(sums: jax.Array, products: Sequence[Product], add: Add) -> jax.Array:
    """As `add_products`; each is added while the next one is at work. Not interpreted."""

    def go_on(number: int, sums: jax.Array, before: Any) -> jax.Array:
        product = products[number]
        first = product.operands[0]()  # while the one before is at work
        if before is not None:
            # To read a product waits for all that have begun. So this comes before the next one
            # begins, and the compiler moves what follows from it to after that.
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


def _multiplied_now(product: Product, sums: jax.Array) -> jax.Array:
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
    """The layout of rows [8 · n, channels], alike in all warps, as columns for `_mma`."""
    elements = 4 // dtype.itemsize  # of a register
    tiling = fragmented_array.Tiling(((8, 4 * elements), (elements,)))
    warps = fragmented_array.Replicated(4)
    return memory.layouts.TILED(tiling, warp_dims=(warps,), lane_dims=(-3, -2), vector_dim=-1)


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
