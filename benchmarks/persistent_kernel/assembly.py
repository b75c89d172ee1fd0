"""PTX in a kernel of Mosaic GPU: operands from references, scalars and sums."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.mosaic import gpu as mosaic_gpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from mpjax.kernels.mosaic import memory

SUMS_LAYOUT = memory.layouts.WGMMA.reduce(1)


class Assembly(NamedTuple):
    """PTX whose operands are named `{0}`, `{1}`, …: references first, then scalars.

    Sums are `{s0}`, `{s1}`, …, which the PTX reads and, where it is to return any, changes.
    """

    text: str


def run(
    assembly: Assembly,
    *references: Any,
    scalars: Sequence[jax.Array] = (),
    sums: jax.Array | None = None,
    returns: bool = True,
) -> Any:
    """Runs PTX with the addresses of references, scalars of 32 bits, and sums; returns the sums."""
    scalar = memory.layouts.WG_SPLAT(())
    kinds: list[Any] = [plgpu.RefType()] * len(references) + [scalar] * len(scalars)
    values = [*references, *scalars]
    return_type = None
    if sums is not None:
        kinds, values = [*kinds, SUMS_LAYOUT], [*values, sums]
        if returns:
            return_type = plgpu.ShapeDtypeStruct(sums.shape, sums.dtype, layout=SUMS_LAYOUT)
    emit = functools.partial(_emit, assembly, sums is not None, return_type is not None)
    run = plgpu.inline_mgpu(
        arg_types=tuple(kinds), return_type=() if return_type is None else return_type
    )
    return run(emit)(*values)


def _emit(assembly: Assembly, has_sums: bool, returns: bool, context: Any, *values: Any) -> Any:
    sums = values[-1] if has_sums else None
    inputs = [_operand(value) for value in (values[:-1] if has_sums else values)]
    # A register of sums is a vector of one element.
    registers = [] if sums is None else list(sums.registers.flat)
    floats = [vector.extract(register, [], [0]) for register in registers]
    outputs = len(floats) if returns else 0
    # Operands are numbered: outputs, then inputs, then the old values of the outputs.
    names = {f"s{i}": f"${i if returns else len(inputs) + i}" for i in range(len(floats))}
    numbers = [f"${outputs + i}" for i in range(len(inputs))]
    text = "{\n" + assembly.text.format(*numbers, **names) + "\n}"
    of_type = ["l" if value.type == ir.IntegerType.get_signless(64) else "r" for value in inputs]
    old = [str(i) for i in range(outputs)] if returns else ["f"] * len(floats)
    constraints = ",".join(["=f"] * outputs + of_type + old + ["~{memory}"])
    float32 = ir.F32Type.get()
    result_type = None
    if outputs:
        result_type = llvm.StructType.get_literal([float32] * outputs)
    found = llvm.inline_asm(
        result_type, [*inputs, *floats], text, constraints, has_side_effects=True, asm_dialect=0
    )
    if not returns:
        return ()
    assert sums is not None
    one = ir.VectorType.get((1,), float32)
    results = np.empty_like(sums.registers)
    for number, index in enumerate(np.ndindex(results.shape)):
        value = llvm.extractvalue(float32, found, [number])
        results[index] = vector.broadcast(one, value)
    return mosaic_gpu.FragmentedArray(_registers=results, _layout=sums.layout, _is_signed=None)


def _operand(value: Any) -> ir.Value:
    """The address of a reference (32 bits in shared memory, else 64), or a scalar's register."""
    if isinstance(value, mosaic_gpu.FragmentedArray):
        return value.registers.item()
    is_shared = mosaic_gpu.utils.is_smem_ref(value)
    address = ir.IntegerType.get_signless(32 if is_shared else 64)
    return llvm.ptrtoint(address, mosaic_gpu.utils.memref_ptr(value))


def float_literal(value: float) -> str:
    """A float32 literal of PTX."""
    return "0f" + struct.pack(">f", value).hex().upper()


def lines_of(lines: Iterable[str]) -> str:
    """Lines of PTX as one text."""
    return "\n".join(lines)


def registers(prefix: str, numbers: Iterable[int]) -> str:
    """Names of registers in braces, doubled for `str.format`."""
    return "{{" + ", ".join(f"{prefix}{number}" for number in numbers) + "}}"
