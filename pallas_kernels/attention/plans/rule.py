"""The rule that divides attention into tiles and programs if no plan was measured.

Decoding reads the cache once. So each multiprocessor should always have enough bytes in flight, and
all programs should run at once. The rule chooses

- the tile of a program, how many programs are resident on a multiprocessor, and over how many each
  sequence is split, so that all fit on the GPU (`split_rule`). Programs that end soon get small
  tiles, so that they wait for fewer bytes before they begin to compute;
- here: which programs process the residual, whether programs help each other, and how many tiles
  are loaded ahead;
- the registers of a thread (`register_rule`).
"""

from __future__ import annotations

import dataclasses
import math

from mpjax.kernels.attention.plans.configuration import LEAST_KEYS, AttentionConfig, tile_memory
from mpjax.kernels.attention.plans.problem import Problem
from mpjax.kernels.attention.plans.register_rule import registers_by_rule
from mpjax.kernels.attention.plans.split_rule import (
    AHEAD,
    BYTES_IN_FLIGHT,
    SMALL_TILE,
    Split,
    power_below,
    split_by_rule,
)
from mpjax.kernels.plans.plan import Plan

# Programs help each other if sequences have room for more than LONG_SEQUENCE tokens, and for at
# least LONG_TOKENS per program (half as many if keys have channel scales, which are slow).
LONG_SEQUENCE, LONG_TOKENS = 4096, 2048
BRIEF_TILES = 5  # the most tiles of a program that counts as brief
RESIDUAL_TILE_TIME = 0.3  # the time of a tile of the residual over that of a tile of slow keys
# In brief launches, a residual gets at least a program for every MOST_RESIDUAL_TILES of its tiles;
# in any launch it gets at most MOST_RESIDUAL_SPLITS programs.
MOST_RESIDUAL_TILES, MOST_RESIDUAL_SPLITS = 8, 4


def plan_by_rule(problem: Problem) -> Plan:
    """The rule's plan for a problem; it can always run."""
    return Plan("triton", config_by_rule(problem))


def config_by_rule(problem: Problem) -> AttentionConfig:
    """The rule's configuration for a problem; it can always run."""
    split = split_by_rule(problem)
    tile, splits, is_brief = split.tile, split.splits, _is_brief(problem, split)
    is_balanced = _is_balanced(problem, split)
    residual_keys, residual_splits = _residual(problem, split, is_brief=is_brief)
    balances_channel_keys = is_balanced and problem.has_channel_keys
    if tile.is_narrow and split.room == splits == 1 and not balances_channel_keys:
        residual_splits = 0  # one program processes a whole sequence, without partials
    elif is_brief:
        splits = max(1, min(splits, split.room - residual_splits))
    if is_brief and split.is_small:  # the fewest splits with the same tiles in the longest program
        splits = math.ceil(split.tiles / math.ceil(split.tiles / splits))
    # Crowded programs have large tiles, share the GPU with programs of the residual, and are fewer
    # than the tiles.
    is_crowded = is_brief and not split.is_small and residual_splits > 0 and splits < split.tiles
    one_ahead = is_crowded and problem.has_channel_keys
    config = AttentionConfig(
        *(tile.rows, tile.keys, splits, tile.warps),
        stages=2 if one_ahead else 1 + _ahead(problem, split, splits),
        residual_keys=residual_keys,
        residual_splits=residual_splits,
        is_balanced=is_balanced,
        has_one_loop=tile.is_narrow and balances_channel_keys and problem.has_two_bit_keys,
    )
    return dataclasses.replace(config, registers=registers_by_rule(problem, config))


def _is_brief(problem: Problem, split: Split) -> bool:
    """Whether programs have slow keys and few tiles, so that all programs should run at once."""
    is_slow = problem.has_slow_keys and split.tile.is_narrow
    return is_slow and 0 < split.tiles <= BRIEF_TILES * split.splits


def _is_balanced(problem: Problem, split: Split) -> bool:
    """Whether sequences may be so long that programs of short ones should help (`balance`)."""
    has_few_rows = split.tile.is_narrow or problem.rows <= split.tile.rows
    if problem.batch == 1 or problem.is_varlen or not has_few_rows:
        return False
    has_channels = problem.has_channel_keys and split.tile.is_narrow
    long = LONG_TOKENS // (2 if has_channels else 1) * split.splits
    return problem.tokens > LONG_SEQUENCE and problem.tokens >= long


def _residual(problem: Problem, split: Split, *, is_brief: bool) -> tuple[int, int]:
    """The keys of a tile of the residual, and the number of programs that share the residual.

    A tile of the residual has at most as many bytes as a tile of packed keys.
    """
    if not problem.residual:
        return LEAST_KEYS, 0
    fitting = split.tile.keys * problem.token_bytes // (2 * 2 * problem.cache.head_dim)
    keys = min(split.tile.keys, max(LEAST_KEYS, power_below(max(1, fitting))))
    tiles, packed = problem.residual // keys, max(1, split.tiles)
    if is_brief:  # so that they end with the programs of packed keys
        time = RESIDUAL_TILE_TIME * tiles
        programs = max(round(split.splits * time / (time + packed)), tiles // MOST_RESIDUAL_TILES)
    else:  # with as many tiles as programs of packed keys
        programs = round(split.splits * tiles / packed)
    return keys, min(max(1, programs), tiles, MOST_RESIDUAL_SPLITS)


def _ahead(problem: Problem, split: Split, splits: int) -> int:
    """The number of tiles that a program loads ahead, AHEAD or 1.

    It is 1 if all programs run at once only with 1. For programs that don't decode and would not
    all run at once even with 1, it is AHEAD.
    """
    tile, memory = split.tile, tile_memory(problem, split.tile.rows)
    tile_bytes = tile.keys * problem.token_bytes
    programs = -(-problem.programs(tile.rows) * splits // problem.limits.multiprocessors)
    only_reads = tile.is_narrow and not problem.is_decoded
    most = memory if only_reads else min(memory, BYTES_IN_FLIGHT)
    all_run = tile_bytes <= SMALL_TILE or AHEAD * programs * tile_bytes <= most
    ahead = AHEAD if all_run or (only_reads and programs * tile_bytes > memory) else 1
    if problem.residual:
        tile_bytes = max(tile_bytes, 2 * 2 * problem.cache.head_dim * LEAST_KEYS)
    return max(1, min(ahead, memory // tile_bytes))
