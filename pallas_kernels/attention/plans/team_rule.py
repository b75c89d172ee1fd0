"""The rule for teams: the tile of a program, and how many programs share a sequence."""

from __future__ import annotations

from typing import NamedTuple

from mpjax.kernels.attention.plans.configuration import (
    MINIMUM_ROWS,
    MOST_KEYS,
    NARROW_ROWS,
    tile_memory,
)
from mpjax.kernels.attention.plans.problem import Problem

SMALL_KEYS = 64  # of a tile, whatever the page size
CHANNELS_OF_WARP = 16  # of a plane of values, which the warps of a narrow tile divide
BYTES_ON_THEIR_WAY = 131072  # to a multiprocessor, which keep an H200's memory busy
AHEAD = 2  # tiles that a program reads ahead
SMALL_TILE = 16384  # bytes, of which AHEAD are read ahead in any company
MOST_COMPANY = 8  # programs on a multiprocessor: what more of them gain, joining them costs
MOST_SPLITS = 130  # beside two programs for the residual: 8 KV heads fill an H200
MOST_TILES = 64  # of a program of one long sequence, which no other program helps
# Of a program that ends soon: of one that only reads 16 bits, that decodes, and that has others for
# a residual beside it.
FEW_TILES, FEW_TILES_OF_CODES, FEW_TILES_BESIDE = 16, 8, 1.5
FITTING_WARPS = 8  # on a multiprocessor, with as many registers as they want
FEW_SPLITS = 2  # which gain too little to be joined, if they end soon
FAST_SPLITS, SPLITS_UNIT = 32, 8  # more programs are joined faster in multiples of eight


class Tile(NamedTuple):
    """Rows and keys of a tile, and the warps of its program."""

    rows: int
    keys: int
    warps: int

    @property
    def is_narrow(self) -> bool:
        """Whether its rows are fewer than its keys, so that scores take the keys' scales."""
        return self.rows <= NARROW_ROWS


class Team(NamedTuple):
    """The programs of packed keys.

    tiles: of a sequence. company: programs on a multiprocessor. room: how many programs of a
    sequence that leaves room for. splits: how many it has. is_small: whether tiles are, since
    programs end soon.
    """

    tile: Tile
    tiles: int
    company: int
    room: int
    splits: int
    is_small: bool = False


def team_by_rule(problem: Problem) -> Team:
    """Large tiles; small ones, if programs end soon or if only so all of them run at once."""
    tile = largest_tile(problem)
    # Programs that multiply queries by scales of channels wait for themselves: as many as fit.
    has_channels = problem.has_channel_keys and tile.is_narrow
    most_bytes = tile_memory(problem, tile.rows) if has_channels else BYTES_ON_THEIR_WAY
    team = _team(problem, tile, most_bytes)
    keys = min(tile.keys, SMALL_KEYS)
    has_value_channels = problem.cache.format.value_codes.scaling == "channel"
    has_one_size = tile.keys == keys and not problem.is_decoded
    if not tile.is_narrow or has_one_size or has_value_channels:
        return team
    if team.room == 1 and problem.is_decoded and not has_channels:
        keys = keys if _needs_small_tiles(problem, team) else tile.keys
        return team._replace(tile=tile._replace(keys=keys), tiles=problem.tiles(keys))
    few_tokens = _few_tiles(problem) * tile.keys
    if problem.tokens > few_tokens * team.room or _has_one_each(problem, team):
        return team
    if team.room <= FEW_SPLITS and problem.is_decoded:
        return team._replace(room=1, splits=1)
    warps = tile.warps if problem.is_decoded else tile.warps // 2
    small = tile._replace(keys=keys, warps=warps)
    return _team(problem, small, BYTES_ON_THEIR_WAY // 2, is_small=True)


def _team(problem: Problem, tile: Tile, most_bytes: int, *, is_small: bool = False) -> Team:
    """Programs with so many bytes on their way to a multiprocessor."""
    memory = tile_memory(problem, tile.rows)
    company = min(most_bytes, memory) // (AHEAD * tile.keys * problem.token_bytes)
    company = max(1, min(company, MOST_COMPANY))
    room = problem.limits.multiprocessors * company // problem.programs(tile.rows)
    room, tiles = max(1, room), problem.tiles(tile.keys)
    splits = max(1, min(room, tiles))
    if is_small and FAST_SPLITS < splits < tiles and not problem.has_slow_keys:
        splits -= splits % SPLITS_UNIT
    if tile.is_narrow and (problem.batch == 1 or problem.is_varlen):
        splits = max(splits, -(-problem.tokens // (tile.keys * MOST_TILES)))
    return Team(tile, tiles, company, room, min(splits, MOST_SPLITS), is_small)


def _needs_small_tiles(problem: Problem, team: Team) -> bool:
    """Whether only with small tiles all programs run at once, each of them with a sequence."""
    programs = problem.programs(team.tile.rows) / problem.limits.multiprocessors
    is_fitting = team.company < programs <= min(2 * team.company, MOST_COMPANY)
    return is_fitting and team.tile.warps < 4 and team.tiles <= MOST_TILES // 2


def _few_tiles(problem: Problem) -> float:
    """Tiles of a program that ends soon."""
    if problem.residual:
        return FEW_TILES_BESIDE
    return FEW_TILES_OF_CODES if problem.is_decoded else FEW_TILES


def _has_one_each(problem: Problem, team: Team) -> bool:
    """Whether one tile for each program fills the GPU, and no smaller tiles should.

    Four warps share a large tile well, and scales of keys' channels are loaded once for it.
    """
    least = 2 if problem.has_channel_keys else 4
    if team.tile.warps < least or team.tiles > team.splits:
        return False
    multiprocessors = problem.limits.multiprocessors
    programs = problem.programs(team.tile.rows) * team.tiles
    return multiprocessors <= programs <= multiprocessors * FITTING_WARPS // team.tile.warps


def largest_tile(problem: Problem) -> Tile:
    """The tile of a program with many keys."""
    head_dim, format = problem.cache.head_dim, problem.cache.format
    rows = _rows(problem)
    keys = min(max(problem.cache.page_size, SMALL_KEYS), MOST_KEYS, format.group or MOST_KEYS)
    if rows <= NARROW_ROWS:
        slices = head_dim // format.value_codes.planes // CHANNELS_OF_WARP
        warps = min(4, power_below(max(1, slices)))
    else:  # sums of 64 rows and 128 channels are what fits in the registers of four warps
        keys = min(keys, SMALL_KEYS) if head_dim > 128 else keys
        warps = 8 if head_dim > 128 or rows > 64 else 4
    most_bytes = min(BYTES_ON_THEIR_WAY // AHEAD, tile_memory(problem, rows))
    keys = min(keys, power_below(most_bytes // problem.token_bytes))
    return Tile(rows, keys, warps)


def _rows(problem: Problem) -> int:
    """Rows of a tile: a narrow one, where a few narrow tiles are faster than a wide one."""
    if problem.has_channel_keys:
        narrow, tiles = MINIMUM_ROWS, 4 if problem.has_two_bit_keys else 2
    else:
        narrow, tiles = NARROW_ROWS, 2 if problem.is_decoded else 1
    # What is decoded takes registers, too: rather two programs with half of the rows.
    wide = 64 if problem.is_decoded or problem.cache.head_dim > 128 else 128
    most = narrow if problem.rows <= tiles * narrow else wide
    return max(MINIMUM_ROWS, min(most, 1 << (problem.rows - 1).bit_length()))


def power_below(number: int) -> int:
    """The largest power of two that is no more than a number."""
    return 1 << (number.bit_length() - 1)
