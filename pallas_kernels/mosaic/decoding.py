"""The target of Mosaic GPU kernels, which decode codes in registers as an operand of `wgmma`."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mosaic_gpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from mpjax.kernels.codes.look_up import ROW_BYTES, pair_rows
from mpjax.kernels.mosaic import WARPGROUP_OUTPUTS, memory
from mpjax.kernels.target import Target

_layouts = plgpu.Layout


def shared_rows_of_pairs(bits: int) -> Any:
    """The scratch type of rows in shared memory for all pairs of a table's 2**bits values."""
    return plgpu.SMEM((pair_rows(bits), ROW_BYTES // 4), jnp.uint32)


class Pairs(NamedTuple):
    """Shared memory for all pairs of a table's values, for `look_up.InSharedRows`."""

    rows: Any  # a reference to memory of the type `shared_rows_of_pairs`
    filled: Any  # a barrier for all consumer warpgroups
    warpgroups: int  # the number of consumer warpgroups, the first ones of a program


class Warpgroups(Target):
    """The target of kernels whose warpgroups have tiles [64, width], a row for each output channel.

    pairs: shared memory for the pairs of a table, if codes index a table.
    has_spare_registers: whether registers have room for a table of up to eight entries, too.
    """

    is_interpreted = False
    has_ptx = True
    has_shared_rows = True

    def __init__(self, pairs: Pairs | None = None, *, has_spare_registers: bool = False) -> None:
        self.pairs, self.has_spare_registers = pairs, has_spare_registers

    def column(self, x: jax.Array, width: int) -> jax.Array:
        """Broadcasts values [64] to a whole tile [64, width]; all registers of a row are equal."""
        return jax.lax.broadcast_in_dim(x, (WARPGROUP_OUTPUTS, width), (0,))

    def multiply_add(self, factor: jax.Array, other: jax.Array, addend: jax.Array) -> jax.Array:
        """Factor · other + addend of sums [64, rows], rounded once."""
        layout = memory.layouts.WGMMA
        apply = plgpu.inline_mgpu(
            arg_types=(layout,) * 3,
            return_type=plgpu.ShapeDtypeStruct(factor.shape, jnp.dtype(jnp.float32), layout=layout),
        )(_multiply_add)
        result: jax.Array = apply(factor, other, addend)
        return result

    def register_column(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Broadcasts 32-bit values [64] to tiles of uint8, with the same bytes in each register."""
        layout = memory.operand_layout(jnp.uint8)
        spread = plgpu.inline_mgpu(
            arg_types=(layout.reduce(1),),
            return_type=plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.uint8), layout=layout),
        )(functools.partial(_spread, shape))
        result: jax.Array = spread(x)
        return result

    def fill_rows(
        self, table: Any, bits: int, operand: jnp.dtype, width: int
    ) -> tuple[jax.Array, jax.Array]:
        """Fills `pairs` together with the other consumer warpgroups, and waits for them."""
        assert self.pairs is not None
        shape = WARPGROUP_OUTPUTS, width
        fill = plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), plgpu.RefType()), return_type=(_uniform(shape),) * 2
        )(functools.partial(_fill, bits, operand, self.pairs.warpgroups, shape))
        lanes, address = fill(table, self.pairs.rows)
        memory.arrive(self.pairs.filled)
        memory.wait(self.pairs.filled)
        return lanes, address

    def table_bytes(
        self, table: Any, bits: int, operand: jnp.dtype, width: int
    ) -> tuple[jax.Array, ...]:
        """Loads all entries of the table in each thread."""
        count, shape = 2**bits // 2, (WARPGROUP_OUTPUTS, width)
        load = plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(),), return_type=(_uniform(shape),) * count
        )(functools.partial(_table_bytes, bits, operand, shape))
        result: tuple[jax.Array, ...] = tuple(load(table))
        return result

    def inline_ptx(
        self, assembly: str, *arguments: jax.Array, dtype: jax.typing.DTypeLike
    ) -> jax.Array:
        """Applies PTX to the registers of tiles, one register of each tile at a time."""
        shape, layout = arguments[0].shape, memory.operand_layout(dtype)
        uniform = _layouts.WG_SPLAT(shape)
        apply = plgpu.inline_mgpu(
            arg_types=tuple(
                uniform if argument.dtype.itemsize == 4 else layout for argument in arguments
            ),
            return_type=plgpu.ShapeDtypeStruct(shape, jnp.dtype(dtype), layout=layout),
        )(functools.partial(_apply_ptx, assembly, jnp.dtype(dtype)))
        result: jax.Array = apply(*arguments)
        return result


def _multiply_add(context: Any, *tiles: mosaic_gpu.FragmentedArray) -> mosaic_gpu.FragmentedArray:
    registers = np.empty_like(tiles[0].registers)
    for index in np.ndindex(registers.shape):
        registers[index] = llvm.intr_fma(*(tile.registers[index] for tile in tiles))
    return mosaic_gpu.FragmentedArray(
        _registers=registers, _layout=tiles[0].layout, _is_signed=None
    )


def _uniform(shape: tuple[int, int]) -> Any:
    """The type of an int32 tile with one value, which takes one register of each thread."""
    return plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.int32), layout=_layouts.WG_SPLAT(shape))


def _fill(
    bits: int,
    operand: jnp.dtype,
    warpgroups: int,
    shape: tuple[int, int],
    context: Any,
    table: ir.Value,
    rows: ir.Value,
) -> tuple[mosaic_gpu.FragmentedArray, mosaic_gpu.FragmentedArray]:
    # Eight threads write a row, each of them four copies of its word. The last rows may be written
    # twice.
    word, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
    constant = functools.partial(mosaic_gpu.c, ty=word)
    value_type = mosaic_gpu.utils.dtype_to_ir_type(operand)
    thread, count, at_once = mosaic_gpu.utils.thread_idx(), pair_rows(bits), 16 * warpgroups
    first = arith.shrui(thread, constant(3))
    column = arith.shli(arith.andi(thread, constant(7)), constant(2))

    def value(code: ir.Value) -> ir.Value:
        entry = arith.andi(code, constant(2**bits - 1))
        loaded = memref.load(table, [arith.index_cast(index, entry)])
        return arith.truncf(value_type, loaded)

    for number in range(-(-count // at_once)):
        row = arith.minui(arith.addi(first, constant(number * at_once)), constant(count - 1))
        pair = [value(row), value(arith.shrui(row, constant(4)))]
        both = vector.from_elements(ir.VectorType.get((2,), value_type), pair)
        one = vector.bitcast(ir.VectorType.get((1,), word), both)
        four = vector.broadcast(ir.VectorType.get((4,), word), vector.extract(one, [], [0]))
        vector.store(four, rows, [arith.index_cast(index, i) for i in (row, column)])

    lane = arith.shli(arith.andi(thread, constant(31)), constant(2))
    address = llvm.ptrtoint(word, mosaic_gpu.utils.memref_ptr(rows))
    # A splat should be the same in all threads. Here each thread's register has its own value,
    # which is safe because only `_apply_ptx` uses it.
    return _splat(shape, lane), _splat(shape, address)


def _table_bytes(
    bits: int, operand: jnp.dtype, shape: tuple[int, int], context: Any, table: ir.Value
) -> tuple[mosaic_gpu.FragmentedArray, ...]:
    half, word, index = *map(ir.IntegerType.get_signless, (16, 32)), ir.IndexType.get()
    value_type = mosaic_gpu.utils.dtype_to_ir_type(operand)
    constant = functools.partial(mosaic_gpu.c, ty=word)
    words: list[Any] = [constant(0)] * (2**bits // 2)
    for entry in range(2**bits):
        loaded = memref.load(table, [mosaic_gpu.c(entry, index)])
        value = arith.extui(word, arith.bitcast(half, arith.truncf(value_type, loaded)))
        low, high = arith.andi(value, constant(0xFF)), arith.shrui(value, constant(8))
        number, place = divmod(entry, 4)
        for first, byte in ((0, low), (len(words) // 2, high)):
            placed = arith.shli(byte, constant(8 * place))
            words[first + number] = arith.ori(words[first + number], placed)
    return tuple(_splat(shape, each) for each in words)


def _splat(shape: tuple[int, int], value: ir.Value) -> mosaic_gpu.FragmentedArray:
    return mosaic_gpu.FragmentedArray(
        _registers=np.array(value, dtype=object),
        _layout=mosaic_gpu.WGSplatFragLayout(shape),
        _is_signed=True,
    )


def _spread(
    shape: tuple[int, ...], context: Any, words: mosaic_gpu.FragmentedArray
) -> mosaic_gpu.FragmentedArray:
    layout = mosaic_gpu.WGMMA_LAYOUT_8BIT
    four = ir.VectorType.get((4,), ir.IntegerType.get_signless(8))
    rows, *across = layout.registers_shape(shape)
    registers = [vector.bitcast(four, word) for word in words.registers.flat]
    one_column = np.array(registers, dtype=object).reshape(rows, 1, *across[1:])
    return mosaic_gpu.FragmentedArray(
        _registers=np.broadcast_to(one_column, (rows, *across)), _layout=layout, _is_signed=False
    )


def _apply_ptx(
    assembly: str,
    dtype: jnp.dtype,
    context: Any,
    *tiles: mosaic_gpu.FragmentedArray,
) -> mosaic_gpu.FragmentedArray:
    word = ir.IntegerType.get_signless(32)
    words = ir.VectorType.get((1,), word)
    elements = 4 // dtype.itemsize  # elements of a register
    register = ir.VectorType.get((elements,), mosaic_gpu.utils.dtype_to_ir_type(dtype))
    # As with Triton's inline assembly, an argument of 32-bit elements fills one operand for each
    # element of a register; here all of these operands are the splat's one register.
    uniform = [isinstance(t.layout, mosaic_gpu.WGSplatFragLayout) for t in tiles]
    copies = [elements if is_uniform else 1 for is_uniform in uniform]
    constraints = ",".join(["=r"] + ["r"] * sum(copies))

    def apply(*values: Any) -> ir.Value:
        operands = []
        for value, is_uniform, count in zip(values, uniform, copies, strict=True):
            if not is_uniform:
                value = vector.extract(vector.bitcast(words, value), [], [0])
            operands += [value] * count
        result: Any = llvm.inline_asm(
            word, operands, assembly, constraints, has_side_effects=False, asm_dialect=0
        )
        return vector.bitcast(register, vector.broadcast(words, result))

    results = np.empty_like(tiles[0].registers)
    for index in np.ndindex(results.shape):
        results[index] = apply(
            *(
                tile.registers.item() if is_uniform else tile.registers[index]
                for tile, is_uniform in zip(tiles, uniform, strict=True)
            )
        )
    is_signed = mosaic_gpu.utils.is_signed(dtype)
    return mosaic_gpu.FragmentedArray(
        _registers=results, _layout=tiles[0].layout, _is_signed=is_signed
    )
