"""Launches Mosaic GPU kernels in PTX that write to the memory of other devices of the host."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm


def run_ptx(
    ptx: str,
    *arguments: Any,
    out_shape: jax.ShapeDtypeStruct,
    programs: int,
    warpgroups: int,
    name: str,
) -> jax.Array:
    """The result of a kernel all of whose threads run PTX.

    ptx: $0, $1, … are the addresses of the arguments, then of the result, in global memory.
    arguments: arrays, which it reads, and JAX references, which it reads and writes.
    """

    def body(context: Any, *arrays: Any) -> None:
        _inline(ptx, [_address(array) for array in arrays])

    found: jax.Array = _kernel(body, len(arguments) + 1, out_shape, programs, warpgroups, name)(
        *arguments
    )
    return found


def write_addresses(inbox: Any, devices: int, rank_word: int) -> None:
    """Writes the addresses of all devices' inboxes, 64 bits each, to the begin of each inbox.

    It also writes the device's number, to the word `rank_word`. JAX makes the devices wait for one
    another before this kernel. inbox: a reference to int32.
    """

    def body(context: Any, array: Any) -> None:
        constant: Any = arith.constant
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        operands = [_address(array), context.device_id()]
        for device in range(devices):
            there = context.to_remote(array, constant(i32, device))
            operands.append(llvm.ptrtoint(i64, utils.memref_ptr(there)))
        lines = [f"st.global.b32 [$0+{4 * rank_word}], $1;"]
        lines += [f"st.global.b64 [$0+{8 * device}], ${device + 2};" for device in range(devices)]
        _inline("\n".join(lines), operands)

    _kernel(body, 1, (), 1, 1, "write_addresses")(inbox)


def _kernel(
    body: Any, arrays: int, out_shape: Any, programs: int, warpgroups: int, name: str
) -> Any:
    call: Any = plgpu.kernel(
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * arrays)(body),
        out_type=out_shape,
        grid=(programs,),
        grid_names=("program",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )

    def run(*arguments: Any) -> Any:
        with jax.enable_x64(False):
            return call(*arguments)

    return run


def _address(array: Any) -> Any:
    i64 = ir.IntegerType.get_signless(64)
    return llvm.ptrtoint(i64, utils.memref_ptr(array))


def _inline(ptx: str, operands: list[Any]) -> None:
    letters = {32: "r", 64: "l"}
    constraints = ",".join(letters[operand.type.width] for operand in operands)
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        operands,
        ptx,
        constraints + ",~{memory}",
        has_side_effects=True,
        asm_dialect=0,
    )
