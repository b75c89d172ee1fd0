"""The rule: which implementation multiplies a problem that nobody has measured."""

from __future__ import annotations

import math
from typing import Literal

from mpjax.kernels.gemm.plans.configuration import FEW_ROWS, ROWS
from mpjax.kernels.gemm.plans.limits import why_not_triton, why_not_warpgroups
from mpjax.kernels.gemm.plans.problem import Problem
from mpjax.kernels.gemm.plans.triton_rule import triton_by_rule
from mpjax.kernels.gemm.plans.warpgroup_rule import warpgroups_by_rule
from mpjax.kernels.plans.plan import Plan

# Without warpgroups, up to so many rows Triton's kernel is the faster one, measured on the H200 at
# K4096 N24576. To write the weight out in 16 bits for cuBLAS takes 67 µs there, which is the price
# of decoding it again for every tile of rows; looking values up is dearer than computing them.
# XLA's FP8 product beats what Triton makes of FP8, which it multiplies in 16 bits; its int8 product
# never beats the fused one, as its sums cross memory. The int8 of two levels takes 42 µs to write
# out: of 4096 rows the product takes 664 µs instead of 803; of 2048, 356 instead of 370, but 194
# instead of 186 at K12288 N4096.
FUSED_ROWS, FUSED_ROWS_OF_TABLES, FUSED_ROWS_OF_FLOAT8 = 256, 128, 32
FUSED_ROWS_OF_LEVELS = 2048
# To so many, warpgroups are the fastest where they can multiply, measured on the H200 at K4096
# N24576: of 4096 rows uint8:g128 takes 1041 µs, and 1065 with cuBLAS and a copy, but 2062 and 2045
# of 8192. uint4 stays ahead (2004 and 2029, 1004 and 1053 at K12288 N4096; 16384 rows of K8192
# N10240: 3679 and 3706), but in groups of 32 (2091 and 2066). Of up to FEW_ROWS, it is tables and
# codes of four bits, and only where Pallas need not copy x; of fewer than ROWS, tables alone: a
# model adds the splits of Triton's product where it is read, and decodes one sequence in 2159 µs a
# token instead of 2183, though alone a product takes up to 14 % longer.
WARPGROUP_ROWS = 4096
# Of 4096 rows, tables of four and three bits take 1081 and 1053 µs at K4096 N24576, and 1064 and
# 1061 with cuBLAS and a copy: there is nothing left to gain.
WARPGROUP_ROWS_OF_TABLES = 2048


def plan_by_rule(problem: Problem, *, warpgroups: bool = True) -> Plan:
    """A sound plan for any problem; without `warpgroups`, not one of theirs."""
    if warpgroups and _suits_warpgroups(problem):
        return Plan("mosaic", warpgroups_by_rule(problem))
    if why_not_triton(problem) or problem.rows > _most_fused_rows(problem):
        return Plan(unfused(problem))
    return Plan("triton", triton_by_rule(problem))


def _suits_warpgroups(problem: Problem) -> bool:
    if why_not_warpgroups(problem) is not None:
        return False
    rows, format, has_table = problem.rows, problem.weight, problem.has_table
    if rows < ROWS:
        return has_table
    if rows <= FEW_ROWS:
        return (has_table or format.codes == "uint4") and rows % ROWS == 0
    if format.operand or (format.codes == "uint4" and format.group_size != 32):
        return True
    return rows <= (WARPGROUP_ROWS_OF_TABLES if has_table else WARPGROUP_ROWS)


def unfused(problem: Problem) -> Literal["dequantize", "xla"]:
    """The implementation for many rows.

    XLA's own product takes operands of 8 bits whose scales are constant along K.
    """
    format = problem.weight
    if format.is_flat and format.group_size is None and why_not_triton(problem) is None:
        return "xla"
    return "dequantize"


def _most_fused_rows(problem: Problem) -> float:
    format = problem.weight
    if format.operand == "int8":
        return math.inf if format.is_flat else FUSED_ROWS_OF_LEVELS
    if format.operand == "float8" and format.group_size is None:
        return FUSED_ROWS_OF_FLOAT8
    return FUSED_ROWS_OF_TABLES if problem.has_table else FUSED_ROWS
