"""How many registers a thread of a Triton kernel may have, which Pallas has no parameter for.

The compiler takes as many as make a program fast, which may leave room for fewer programs beside it
than make them all fast. Triton's own launcher has `maxnreg` for that, an attribute of the module,
and XLA passes it on; a primitive that computes nothing sets it where `launch` has it lowered.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.extend.core import Primitive
from jaxlib.mlir import ir

# A multiprocessor's registers are divided between its four schedulers, and so are its warps.
SCHEDULERS, OF_SCHEDULER = 4, 16384
MOST_REGISTERS = 255  # that a thread can have
UNIT = 8  # of a thread's, as they are given out
WARP = 32  # threads


def registers_for(programs: int, warps: int) -> int:
    """Registers of a thread with which so many programs fit a multiprocessor beside each other."""
    share = math.ceil(programs * warps / SCHEDULERS)
    return min(MOST_REGISTERS, OF_SCHEDULER // (share * WARP) // UNIT * UNIT)


def limit_registers(index: jax.Array, registers: int) -> jax.Array:
    """The index as it is; a thread of the kernel that uses it has no more registers.

    index: of a program; inside a kernel for a GPU.
    """
    result: jax.Array = limit_registers_p.bind(index, registers=registers)
    return result


limit_registers_p = Primitive("limit_registers")
limit_registers_p.def_abstract_eval(lambda index, registers: index)


def lower_limit_registers(context: Any, index: Any, *, registers: int) -> Any:
    """What `limit_registers_p` becomes in Triton's own language: an attribute of the module."""
    operation: Any = ir.InsertionPoint.current.block.owner
    while operation.parent is not None:
        operation = operation.parent
    number = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), registers)
    operation.attributes["ttg.maxnreg"] = number
    return index
