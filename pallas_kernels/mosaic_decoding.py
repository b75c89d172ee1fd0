"""Decoding in Mosaic GPU: what decoders ask of a backend, on the registers of `wgmma`."""

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

from mpjax.kernels import mosaic
from mpjax.kernels.codes.look_up import ROW_BYTES, pair_rows
from mpjax.kernels.gemm.config import CHANNELS

_layouts = plgpu.Layout


def shared_rows_of_pairs(bits: int) -> Any:
    """Rows in shared memory for all pairs of a table's 2**bits values."""
    return plgpu.SMEM((pair_rows(bits), ROW_BYTES // 4), jnp.uint32)


class Pairs(NamedTuple):
    """Shared memory for all pairs of a table's values, as `look_up.InSharedRows` has them."""

    rows: Any  # of `shared_rows_of_pairs`
    filled: Any  # a barrier, at which each warpgroup that computes arrives
    warpgroups: int  # that compute, the first ones of a program


class WgmmaDecoding:
    """Decoding in the registers of `wgmma`'s operand, for tiles [CHANNELS, width].

    pairs: where those of a table go, if the codes index one.
    has_registers: whether there are some to spare for a table of up to eight entries.
    """

    def __init__(
        self, width: int, pairs: Pairs | None = None, *, has_registers: bool = False
    ) -> None:
        self.shape, self.pairs, self.has_registers = (CHANNELS, width), pairs, has_registers

    def column(self, x: jax.Array) -> jax.Array:
        """A value for each channel [CHANNELS] as a tile: in a thread's registers they are alike."""
        return jax.lax.broadcast_in_dim(x, self.shape, (0,))

    def registers(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """32 bits for each channel [CHANNELS] as the four bytes of each of a tile's registers."""
        layout = mosaic.operand_layout(jnp.uint8)
        spread = plgpu.inline_mgpu(
            arg_types=(layout.reduce(1),),
            return_type=plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.uint8), layout=layout),
        )(functools.partial(_spread, shape))
        result: jax.Array = spread(x)
        return result

    def fill_rows(self, table: Any, bits: int, operand: jnp.dtype) -> tuple[jax.Array, ...]:
        """Fills `pairs` together with the other warpgroups; see `look_up.InSharedRows`."""
        assert self.pairs is not None
        fill = plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), plgpu.RefType()), return_type=(self._uniform,) * 2
        )(functools.partial(_fill, bits, operand, self.pairs.warpgroups, self.shape))
        lanes, address = fill(table, self.pairs.rows)
        mosaic.arrive(self.pairs.filled)
        mosaic.wait(self.pairs.filled)
        return lanes, address

    def table_bytes(self, table: Any, bits: int, operand: jnp.dtype) -> tuple[jax.Array, ...]:
        """Low bytes of 2**bits entries, four in a register, then the high ones."""
        count = 2**bits // 2
        load = plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(),), return_type=(self._uniform,) * count
        )(functools.partial(_table_bytes, bits, operand, self.shape))
        result: tuple[jax.Array, ...] = tuple(load(table))
        return result

    @property
    def _uniform(self) -> Any:
        """A tile's 32-bit value that is the same everywhere."""
        layout = _layouts.WG_SPLAT(self.shape)
        return plgpu.ShapeDtypeStruct(self.shape, jnp.dtype(jnp.int32), layout=layout)

    def inline_ptx(
        self, assembly: str, *arguments: jax.Array, dtype: jax.typing.DTypeLike
    ) -> jax.Array:
        """PTX on registers of elements of 16 or 8 bits; see `backend.inline_ptx`."""
        uniform, layout = _layouts.WG_SPLAT(self.shape), mosaic.operand_layout(dtype)
        apply = plgpu.inline_mgpu(
            arg_types=tuple(
                uniform if argument.dtype.itemsize == 4 else layout for argument in arguments
            ),
            return_type=plgpu.ShapeDtypeStruct(self.shape, jnp.dtype(dtype), layout=layout),
        )(functools.partial(_apply_ptx, assembly, jnp.dtype(dtype)))
        result: jax.Array = apply(*arguments)
        return result


def _fill(
    bits: int,
    operand: jnp.dtype,
    warpgroups: int,
    shape: tuple[int, int],
    context: Any,
    table: ir.Value,
    rows: ir.Value,
) -> tuple[mosaic_gpu.FragmentedArray, mosaic_gpu.FragmentedArray]:
    # Eight threads write a row, four words each. The last rows are written more than once.
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
    # What each lane has of its own passes for what is alike in all of them.
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
    elements = 4 // dtype.itemsize  # of a register
    register = ir.VectorType.get((elements,), mosaic_gpu.utils.dtype_to_ir_type(dtype))
    # As for Triton, what is the same in all threads fills as many operands as it has elements.
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
