"""The rule of split-K: the tile of a program, and how many programs share a sequence's keys."""

from __future__ import annotations

from typing import NamedTuple

from mpjax.kernels.attention.plans.configuration import (
    MINIMUM_ROWS,
    MOST_KEYS,
    NARROW_ROWS,
    tile_memory,
)
from mpjax.kernels.attention.plans.problem import Problem

SMALL_KEYS = 64  # keys of a small tile, for any page size
CHANNELS_OF_WARP = 16  # head channels per warp, among which a narrow tile divides a plane of values
BYTES_IN_FLIGHT = 131072  # per multiprocessor, enough to saturate an H200's memory
AHEAD = 2  # tiles that a program loads ahead
SMALL_TILE = 16384  # bytes of a tile up to which AHEAD tiles are always loaded ahead
MOST_RESIDENT = 8  # programs per multiprocessor; joining more partials costs more than it gains
MOST_SPLITS = 130  # with two programs for the residual, 8 KV heads then fill an H200
MOST_TILES = 64  # tiles of a program of one long sequence, if programs don't help each other
# The most tiles of a program that ends soon: if it loads 16 bits without decoding, if it decodes,
# and if other programs process a residual at the same time.
FEW_TILES, FEW_TILES_OF_CODES, FEW_TILES_BESIDE = 16, 8, 1.5
FITTING_WARPS = 8  # warps that fit on a multiprocessor with unlimited registers
FEW_SPLITS = 2  # so few splits gain less than joining their partials costs, if they end soon
FAST_SPLITS, SPLITS_UNIT = 32, 8  # more splits than 32 are joined faster in multiples of 8


class Tile(NamedTuple):
    """The rows and keys of a tile, and the warps of its program."""

    rows: int
    keys: int
    warps: int

    @property
    def is_narrow(self) -> bool:
        """Whether it has fewer rows than keys, so that scales apply to scores, not to keys."""
        return self.rows <= NARROW_ROWS


class Split(NamedTuple):
    """The programs that share the packed keys of a sequence.

    tile: of each program.
    tiles: the number of tiles of a sequence.
    resident: the number of programs on a multiprocessor at once.
    room: the number of programs per sequence that fit on the GPU at once.
    splits: the number of programs per sequence.
    is_small: whether tiles are small because programs end soon.
    """

    tile: Tile
    tiles: int
    resident: int
    room: int
    splits: int
    is_small: bool = False


def split_by_rule(problem: Problem) -> Split:
    """The tile, and the number of programs for a sequence: large tiles, or small ones if faster.

    Small tiles are for programs that end soon, and for programs that all run at once only with
    small tiles.
    """
    tile = largest_tile(problem)
    # Programs that multiply queries by channel scales are limited by instructions, not by memory:
    # as many are resident as fit.
    has_channels = problem.has_channel_keys and tile.is_narrow
    most_bytes = tile_memory(problem, tile.rows) if has_channels else BYTES_IN_FLIGHT
    split = _split(problem, tile, most_bytes)
    keys = min(tile.keys, SMALL_KEYS)
    has_value_channels = problem.cache.format.value_codes.scaling == "channel"
    has_one_size = tile.keys == keys and not problem.is_decoded
    if not tile.is_narrow or has_one_size or has_value_channels:
        return split
    if split.room == 1 and problem.is_decoded and not has_channels:
        keys = keys if _needs_small_tiles(problem, split) else tile.keys
        return split._replace(tile=tile._replace(keys=keys), tiles=problem.tiles(keys))
    few_tokens = _few_tiles(problem) * tile.keys
    if problem.tokens > few_tokens * split.room or _has_one_each(problem, split):
        return split
    if split.room <= FEW_SPLITS and problem.is_decoded:
        return split._replace(room=1, splits=1)
    warps = tile.warps if problem.is_decoded else tile.warps // 2
    small = tile._replace(keys=keys, warps=warps)
    return _split(problem, small, BYTES_IN_FLIGHT // 2, is_small=True)


def _split(problem: Problem, tile: Tile, most_bytes: int, *, is_small: bool = False) -> Split:
    """The split whose programs have at most `most_bytes` in flight per multiprocessor."""
    memory = tile_memory(problem, tile.rows)
    resident = min(most_bytes, memory) // (AHEAD * tile.keys * problem.token_bytes)
    resident = max(1, min(resident, MOST_RESIDENT))
    room = problem.limits.multiprocessors * resident // problem.programs(tile.rows)
    room, tiles = max(1, room), problem.tiles(tile.keys)
    splits = max(1, min(room, tiles))
    if is_small and FAST_SPLITS < splits < tiles and not problem.has_slow_keys:
        splits -= splits % SPLITS_UNIT
    if tile.is_narrow and (problem.batch == 1 or problem.is_varlen):
        splits = max(splits, -(-problem.tokens // (tile.keys * MOST_TILES)))
    return Split(tile, tiles, resident, room, min(splits, MOST_SPLITS), is_small)


def _needs_small_tiles(problem: Problem, split: Split) -> bool:
    """Whether all programs, one per sequence, run at once only with small tiles."""
    programs = problem.programs(split.tile.rows) / problem.limits.multiprocessors
    is_fitting = split.resident < programs <= min(2 * split.resident, MOST_RESIDENT)
    return is_fitting and split.tile.warps < 4 and split.tiles <= MOST_TILES // 2


def _few_tiles(problem: Problem) -> float:
    """The most tiles of a program that ends soon."""
    if problem.residual:
        return FEW_TILES_BESIDE
    return FEW_TILES_OF_CODES if problem.is_decoded else FEW_TILES


def _has_one_each(problem: Problem, split: Split) -> bool:
    """Whether programs of one large tile each fill the GPU, faster than with small tiles.

    Four warps divide a large tile well. With channel scales of keys two suffice, since scales are
    loaded once for each tile.
    """
    least = 2 if problem.has_channel_keys else 4
    if split.tile.warps < least or split.tiles > split.splits:
        return False
    multiprocessors = problem.limits.multiprocessors
    programs = problem.programs(split.tile.rows) * split.tiles
    return multiprocessors <= programs <= multiprocessors * FITTING_WARPS // split.tile.warps


def largest_tile(problem: Problem) -> Tile:
    """The tile for a program with many keys."""
    head_dim, format = problem.cache.head_dim, problem.cache.format
    rows = _rows(problem)
    keys = min(max(problem.cache.page_size, SMALL_KEYS), MOST_KEYS, format.group or MOST_KEYS)
    if rows <= NARROW_ROWS:
        slices = head_dim // format.value_codes.planes // CHANNELS_OF_WARP
        warps = min(4, power_below(max(1, slices)))
    else:  # the sums of 64 rows and 128 head channels fit in the registers of four warps
        keys = min(keys, SMALL_KEYS) if head_dim > 128 else keys
        warps = 8 if head_dim > 128 or rows > 64 else 4
    most_bytes = min(BYTES_IN_FLIGHT // AHEAD, tile_memory(problem, rows))
    keys = min(keys, power_below(most_bytes // problem.token_bytes))
    return Tile(rows, keys, warps)


def _rows(problem: Problem) -> int:
    """The rows of a tile: narrow if a few narrow tiles are faster than a wide one."""
    if problem.has_channel_keys:
        narrow, tiles = MINIMUM_ROWS, 4 if problem.has_two_bit_keys else 2
    else:
        narrow, tiles = NARROW_ROWS, 2 if problem.is_decoded else 1
    # Besides the sums, decoding the cache's codes takes registers: two programs with half of the
    # rows are faster than one.
    wide = 64 if problem.is_decoded or problem.cache.head_dim > 128 else 128
    wide = 32 if problem.cache.head_dim > 256 else wide  # queries stay in OTHER_BYTES
    most = narrow if problem.rows <= tiles * narrow else wide
    return max(MINIMUM_ROWS, min(most, 1 << (problem.rows - 1).bit_length()))


def power_below(number: int) -> int:
    """The largest power of two that is at most `number`."""
    return 1 << (number.bit_length() - 1)
