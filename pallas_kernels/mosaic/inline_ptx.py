"""Launches Mosaic GPU kernels in PTX."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm


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

    def body(_: Any, *arrays: Any) -> None:
        i64 = ir.IntegerType.get_signless(64)
        addresses = [llvm.ptrtoint(i64, utils.memref_ptr(array)) for array in arrays]
        constraints = "l," * len(addresses) + "~{memory}"
        nothing = ir.Type.parse("!llvm.void")
        llvm.inline_asm(nothing, addresses, ptx, constraints, has_side_effects=True, asm_dialect=0)

    arrays = (plgpu.RefType(),) * (len(arguments) + 1)
    call: Any = plgpu.kernel(
        plgpu.inline_mgpu(arg_types=arrays)(body),
        out_type=out_shape,
        grid=(programs,),
        grid_names=("program",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    with jax.enable_x64(False):
        result: jax.Array = call(*arguments)
    return result
