"""Limits the registers of a thread in a Triton kernel, for which Pallas has no parameter.

The compiler gives a thread as many registers as make a single program fast. With fewer, more
programs may fit a multiprocessor, and all of them together finish sooner. Triton has a module
attribute for that limit, `ttg.maxnreg`, and XLA passes it on. A primitive that returns its operand
unchanged sets the attribute when it is lowered; `launch` registers its lowering.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.extend.core import Primitive
from jaxlib.mlir import ir

# Each of a multiprocessor's four schedulers has a quarter of its registers and of its warps.
SCHEDULERS, REGISTERS_PER_SCHEDULER = 4, 16384
MOST_REGISTERS = 255  # of a thread
ALLOCATION_UNIT = 8  # a thread's registers are allocated in multiples of this
WARP = 32  # threads


def registers_for(programs: int, warps: int) -> int:
    """The most registers of a thread with which `programs` programs are resident at a time.

    warps: of each program.
    """
    threads = math.ceil(programs * warps / SCHEDULERS) * WARP
    available = REGISTERS_PER_SCHEDULER // threads // ALLOCATION_UNIT * ALLOCATION_UNIT
    return min(MOST_REGISTERS, available)


def limit_registers(index: jax.Array, registers: int) -> jax.Array:
    """Returns `index` unchanged, and limits each thread of the kernel to `registers` registers.

    Runs inside a kernel that Triton compiles. The kernel has to use the result, a program's index,
    or the compiler removes the limit.
    """
    result: jax.Array = limit_registers_p.bind(index, registers=registers)
    return result


limit_registers_p = Primitive("limit_registers")
limit_registers_p.def_abstract_eval(lambda index, registers: index)


def lower_limit_registers(context: Any, index: Any, *, registers: int) -> Any:
    """Lowers `limit_registers_p` for Triton: sets `ttg.maxnreg` of the module around the kernel."""
    operation: Any = ir.InsertionPoint.current.block.owner
    while operation.parent is not None:
        operation = operation.parent
    number = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), registers)
    operation.attributes["ttg.maxnreg"] = number
    return index
