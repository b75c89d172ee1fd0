"""The rule: how attention that nobody has measured is cut into tiles and programs.

Decoding reads the cache once. So what counts is that every multiprocessor always has enough bytes
on their way, and that all programs run at once: each multiprocessor has a company of so many
programs, and a sequence is split over as many as that leaves room for. Programs that end soon have
small tiles, so that they wait for fewer bytes before they begin.
"""

from __future__ import annotations

import dataclasses
import math

from mpjax.kernels.attention.plans.configuration import LEAST_KEYS, AttentionConfig, tile_memory
from mpjax.kernels.attention.plans.problem import Problem
from mpjax.kernels.attention.plans.register_rule import registers_by_rule
from mpjax.kernels.attention.plans.team_rule import (
    AHEAD,
    BYTES_ON_THEIR_WAY,
    SMALL_TILE,
    Team,
    power_below,
    team_by_rule,
)
from mpjax.kernels.plans.plan import Plan

# Tokens of a sequence, and of each of its programs (half as many with slow steps of channels), from
# which on others' programs help them.
LONG_SEQUENCE, LONG_TOKENS = 4096, 2048
BRIEF_TILES = 5  # of a program with slow keys: up to so many, all programs should run at once
WAITING_TIME = 0.3  # of a tile of the residual, in tiles of slow keys
MOST_WAITING_TILES, MOST_WAITING_SPLITS = 8, 4  # tiles of a brief program, programs of a sequence


def plan_by_rule(problem: Problem) -> Plan:
    """A sound plan for any problem."""
    return Plan("triton", config_by_rule(problem))


def config_by_rule(problem: Problem) -> AttentionConfig:
    """A sound configuration for any problem."""
    team = team_by_rule(problem)
    tile, splits, is_brief = team.tile, team.splits, _is_brief(problem, team)
    is_balanced = _is_balanced(problem, team)
    waiting_keys, waiting = _waiting(problem, team, is_brief=is_brief)
    slows = is_balanced and problem.has_channel_keys
    if tile.is_narrow and team.room == splits == 1 and not slows:
        waiting = 0  # where one program reads all of a sequence, there is nothing to join
    elif is_brief:
        splits = max(1, min(splits, team.room - waiting))
    if is_brief and team.is_small:  # as few as have no more tiles each
        splits = math.ceil(team.tiles / math.ceil(team.tiles / splits))
    is_crowded = is_brief and not team.is_small and waiting > 0 and splits < team.tiles
    one_ahead = is_crowded and problem.has_channel_keys
    config = AttentionConfig(
        *(tile.rows, tile.keys, splits, tile.warps),
        stages=2 if one_ahead else 1 + _ahead(problem, team, splits),
        waiting_keys=waiting_keys,
        waiting_splits=waiting,
        is_balanced=is_balanced,
        has_one_loop=tile.is_narrow and slows and problem.has_two_bit_keys,
    )
    return dataclasses.replace(config, registers=registers_by_rule(problem, config))


def _is_brief(problem: Problem, team: Team) -> bool:
    """Whether programs wait for instructions, and none should begin when others have ended."""
    is_slow = problem.has_slow_keys and team.tile.is_narrow
    return is_slow and 0 < team.tiles <= BRIEF_TILES * team.splits


def _is_balanced(problem: Problem, team: Team) -> bool:
    """Whether programs of short sequences may have to wait long for those of a long one."""
    has_few_rows = team.tile.is_narrow or problem.rows <= team.tile.rows
    if problem.batch == 1 or problem.is_varlen or not has_few_rows:
        return False
    has_channels = problem.has_channel_keys and team.tile.is_narrow
    long = LONG_TOKENS // (2 if has_channels else 1) * team.splits
    return problem.tokens > LONG_SEQUENCE and problem.tokens >= long


def _waiting(problem: Problem, team: Team, *, is_brief: bool) -> tuple[int, int]:
    """Keys of the residual's tiles, which have no more bytes than packed ones, and its programs."""
    if not problem.residual:
        return LEAST_KEYS, 0
    fitting = team.tile.keys * problem.token_bytes // (2 * 2 * problem.cache.head_dim)
    keys = min(team.tile.keys, max(LEAST_KEYS, power_below(max(1, fitting))))
    tiles, packed = problem.residual // keys, max(1, team.tiles)
    if is_brief:  # which end when those of packed keys do
        time = WAITING_TIME * tiles
        programs = max(round(team.splits * time / (time + packed)), tiles // MOST_WAITING_TILES)
    else:  # with as many tiles as those of packed keys
        programs = round(team.splits * tiles / packed)
    return keys, min(max(1, programs), tiles, MOST_WAITING_SPLITS)


def _ahead(problem: Problem, team: Team, splits: int) -> int:
    """Tiles that a program reads ahead: AHEAD, or one if only then all programs run at once.

    Programs that only read, and run one after another whatever is ahead, had better be well ahead.
    """
    tile, memory = team.tile, tile_memory(problem, team.tile.rows)
    tile_bytes = tile.keys * problem.token_bytes
    programs = -(-problem.programs(tile.rows) * splits // problem.limits.multiprocessors)
    only_reads = tile.is_narrow and not problem.is_decoded
    most = memory if only_reads else min(memory, BYTES_ON_THEIR_WAY)
    all_run = tile_bytes <= SMALL_TILE or AHEAD * programs * tile_bytes <= most
    ahead = AHEAD if all_run or (only_reads and programs * tile_bytes > memory) else 1
    return max(1, min(ahead, memory // tile_bytes))
