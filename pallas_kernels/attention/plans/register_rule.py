"""The rule for registers: how many a thread may have, so that as many programs fit as should."""

from __future__ import annotations

from mpjax.kernels.attention.plans.configuration import NARROW_ROWS, AttentionConfig, tile_memory
from mpjax.kernels.attention.plans.problem import Problem
from mpjax.kernels.attention.plans.team_rule import AHEAD, MOST_COMPANY, SMALL_TILE
from mpjax.kernels.registers import MOST_REGISTERS, registers_for

# With fewer, each program loses more than their number gains: programs that help others or should
# all run at once, other programs, and those of two-bit keys, whose loop is the longest. With
# ENOUGH_REGISTERS, no program loses anything.
CROWDED_REGISTERS, LEAST_REGISTERS, ENOUGH_REGISTERS = 168, 192, 224


def registers_by_rule(problem: Problem, config: AttentionConfig) -> int | None:
    """Registers of a thread; None where the assembler knows better."""
    if config.tile_rows > NARROW_ROWS:
        return None
    reads_both = problem.residual > 0 and config.waiting_splits == 0
    if config.has_one_loop or (reads_both and problem.has_slow_keys):
        return MOST_REGISTERS
    may_help = config.is_balanced and problem.cache.head_dim <= 128
    if problem.has_channel_keys:
        tile_bytes = config.tile_keys * problem.token_bytes
        is_brief = config.stages == AHEAD and tile_bytes <= SMALL_TILE
        return _of_channel_keys(problem, config, is_crowded=may_help or is_brief)
    each = -(-problem.programs(config.tile_rows) * config.splits // problem.limits.multiprocessors)
    beside = min(each, _fitting(problem, config, config.stages - 1))
    registers = registers_for(beside, config.warps)
    if may_help:
        return max(registers, CROWDED_REGISTERS)
    return registers if registers >= ENOUGH_REGISTERS else None


def _of_channel_keys(problem: Problem, config: AttentionConfig, *, is_crowded: bool) -> int:
    if problem.has_two_bit_keys:
        return ENOUGH_REGISTERS
    company = min(_fitting(problem, config, AHEAD), MOST_COMPANY)
    least = CROWDED_REGISTERS if is_crowded else LEAST_REGISTERS
    return min(max(registers_for(company, config.warps), least), ENOUGH_REGISTERS)


def _fitting(problem: Problem, config: AttentionConfig, ahead: int) -> int:
    """Programs that have so many tiles each in the shared memory of a multiprocessor."""
    memory = tile_memory(problem, config.tile_rows)
    return max(1, memory // (ahead * config.tile_keys * problem.token_bytes))
