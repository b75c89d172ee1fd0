"""The rule for registers per thread: few enough that the intended programs are resident."""

from __future__ import annotations

from mpjax.kernels.attention.plans.configuration import NARROW_ROWS, AttentionConfig, tile_memory
from mpjax.kernels.attention.plans.problem import Problem
from mpjax.kernels.attention.plans.split_rule import AHEAD, MOST_RESIDENT, SMALL_TILE
from mpjax.kernels.registers import MOST_REGISTERS, registers_for

# Below a certain number of registers, programs lose more than they gain by more resident programs.
# The number is CROWDED_REGISTERS for programs that help others or that should all run at once,
# and LEAST_REGISTERS for other programs. With ENOUGH_REGISTERS, no program loses anything; programs
# of two-bit keys, whose loop is the longest, need as many.
CROWDED_REGISTERS, LEAST_REGISTERS, ENOUGH_REGISTERS = 168, 192, 224


def registers_by_rule(problem: Problem, config: AttentionConfig) -> int | None:
    """The rule's limit of registers per thread; None leaves the number to the assembler."""
    if config.tile_rows > NARROW_ROWS:
        return None
    reads_both = problem.residual > 0 and config.residual_splits == 0
    if config.has_one_loop or (reads_both and problem.has_slow_keys):
        return MOST_REGISTERS
    may_help = config.is_balanced and problem.cache.head_dim <= 128
    if problem.has_channel_keys:
        tile_bytes = config.tile_keys * problem.token_bytes
        is_brief = config.stages == AHEAD and tile_bytes <= SMALL_TILE
        return _registers_for_channel_keys(problem, config, is_crowded=may_help or is_brief)
    each = -(-problem.programs(config.tile_rows) * config.splits // problem.limits.multiprocessors)
    resident = min(each, _fitting(problem, config, config.stages - 1))
    registers = registers_for(resident, config.warps)
    if may_help:
        return max(registers, CROWDED_REGISTERS)
    return registers if registers >= ENOUGH_REGISTERS else None


def _registers_for_channel_keys(
    problem: Problem, config: AttentionConfig, *, is_crowded: bool
) -> int:
    if problem.has_two_bit_keys:
        return ENOUGH_REGISTERS
    resident = min(_fitting(problem, config, AHEAD), MOST_RESIDENT)
    least = CROWDED_REGISTERS if is_crowded else LEAST_REGISTERS
    return min(max(registers_for(resident, config.warps), least), ENOUGH_REGISTERS)


def _fitting(problem: Problem, config: AttentionConfig, ahead: int) -> int:
    """The number of programs, each with `ahead` tiles, that fit in a multiprocessor's memory."""
    memory = tile_memory(problem, config.tile_rows)
    return max(1, memory // (ahead * config.tile_keys * problem.token_bytes))
