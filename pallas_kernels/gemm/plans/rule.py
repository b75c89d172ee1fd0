"""The rule: the plan of a problem without a measured plan."""

from __future__ import annotations

import math
from typing import Literal

from mpjax.kernels.gemm.plans.configuration import FEW_ROWS, ROW_MULTIPLE
from mpjax.kernels.gemm.plans.limits import why_not_triton, why_not_warpgroups
from mpjax.kernels.gemm.plans.problem import Problem
from mpjax.kernels.gemm.plans.triton_rule import triton_by_rule
from mpjax.kernels.gemm.plans.warpgroup_rule import warpgroups_by_rule
from mpjax.kernels.plans.plan import Plan

# The most rows for which Triton's kernel is faster than an unfused product, measured on an H200 at
# K4096 N24576. Triton's kernel decodes the weight again for every tile of rows; the unfused product
# dequantises it once. Codes of a table are slower to decode, so their limit is lower. Triton
# multiplies FP8 in 16 bits, so XLA's FP8 product is faster beyond few rows. XLA's int8 product
# never is, because its sums go through memory. liquid4 (W4A8) becomes int8, half the bytes.
FUSED_ROWS, FUSED_ROWS_OF_TABLES, FUSED_ROWS_OF_FLOAT8 = 256, 128, 32
FUSED_ROWS_OF_LIQUID4 = 2048
# The most rows for which the warpgroup kernel is faster than a copy of the weight and cuBLAS,
# measured on an H200 at K4096 N24576. Products with 8-bit activations, and uint4 in groups other
# than 32, have no such limit.
WARPGROUP_ROWS, WARPGROUP_ROWS_OF_TABLES = 4096, 2048


def plan_by_rule(problem: Problem, *, warpgroups: bool = True) -> Plan:
    """The rule's plan for any problem.

    warpgroups: whether it may choose the warpgroup kernel.
    """
    if warpgroups and _suits_warpgroups(problem):
        return Plan("mosaic", warpgroups_by_rule(problem))
    if why_not_triton(problem) or problem.rows > _most_fused_rows(problem):
        return Plan(unfused(problem))
    return Plan("triton", triton_by_rule(problem))


def _suits_warpgroups(problem: Problem) -> bool:
    # MXFP4 is used for experts, which have another rule; its dense products are not measured.
    if why_not_warpgroups(problem) is not None or problem.weight.codes == "float4":
        return False
    rows, format, has_table = problem.rows, problem.weight, problem.has_table
    # The next kernel sums the splits of Triton's product while loading them. So with fewer rows
    # than ROW_MULTIPLE, whole models are faster with Triton's kernel, even if this product isn't.
    if rows < ROW_MULTIPLE:
        return has_table
    if rows <= FEW_ROWS:  # with rows that are not a multiple, Pallas copies x
        return (has_table or format.codes == "uint4") and rows % ROW_MULTIPLE == 0
    if format.operand or (format.codes == "uint4" and format.group_size != 32):
        return True
    return rows <= (WARPGROUP_ROWS_OF_TABLES if has_table else WARPGROUP_ROWS)


def unfused(problem: Problem) -> Literal["dequantize", "xla"]:
    """The unfused implementation of a problem, for many rows.

    This is `xla` for two 8-bit operands whose scales are constant along K, else `dequantize`.
    """
    format = problem.weight
    if format.is_flat and format.group_size is None and why_not_triton(problem) is None:
        return "xla"
    return "dequantize"


def _most_fused_rows(problem: Problem) -> float:
    format = problem.weight
    if format.operand == "int8":
        # int4 is never dequantised: a 16-bit copy would be multiplied at half the speed of int8.
        return math.inf if format.is_flat or format.codes == "int4" else FUSED_ROWS_OF_LIQUID4
    if format.operand == "float8" and format.group_size is None:
        return FUSED_ROWS_OF_FLOAT8
    return FUSED_ROWS_OF_TABLES if problem.has_table else FUSED_ROWS
