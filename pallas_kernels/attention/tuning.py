"""Which configuration paged attention runs with."""

from __future__ import annotations

import dataclasses
import math

from pallas_kernels import backend
from pallas_kernels.kv_cache.cache import KVPages

MINIMUM_ROWS = 8  # the narrow side of the tensor-core instruction
MINIMUM_KEYS, MAXIMUM_KEYS = 64, 128  # of a tile, whatever the page size
TILE_BYTES = 32768  # of keys or values at most: a tile of both fits the smallest shared memory
# Found on the H200, from KV2 to KV16: two tiles on their way for each program, and together so many
# bytes on a multiprocessor. More programs cost more, when their results are joined, than they gain.
BYTES_PER_MULTIPROCESSOR = 131072
MOST_AHEAD = 2  # tiles
MOST_PROGRAMS_PER_MULTIPROCESSOR = 8
MOST_SPLITS = 130  # with what waits, one sequence of 8 KV heads fills an H200
SMALL_TILE_BYTES = 16384  # of which any number of programs has two on their way
# Of a program that decodes: others need not wait long for one whose sequence is the longest by far.
# To share programs out by length, in the kernel, was slower where lengths are equal, and no faster
# than more programs for each sequence where they aren't.
MOST_TILES = 64
# Of what a program decodes where sequences are short: it has hardly begun before it ends. Then
# tiles are smaller, programs and the bytes on their way fewer, the more so if tiles are few still.
FEW_TILES = 8
SHORT_BYTES, SHORT_PROGRAMS = (98304, 65536), 4  # per multiprocessor
ENOUGH_BYTES = 62000  # per multiprocessor, on their way to programs that share nothing
LEAST_WAITING_KEYS = 16  # of a tile
MOST_WAITING_SPLITS = 4  # more cost more, when their results are joined, than they gain
OTHER_BYTES = 32768  # of shared memory: queries, and what leaves


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Rows and keys in a tile, programs that share one sequence, and compiler settings.

    A tile of keys is a piece of a page, or several pages: both sizes are powers of two. What waits
    in 16 bits, in formats where something does, has smaller tiles and programs beside those.
    """

    tile_rows: int
    tile_keys: int
    splits: int
    warps: int
    stages: int
    waiting_keys: int = LEAST_WAITING_KEYS
    waiting_splits: int = 0


def configure(batch: int, rows: int, pages_per_sequence: int, pages: KVPages) -> AttentionConfig:
    """A sound configuration for `rows` (token, head) pairs of each sequence and KV head."""
    is_wide = pages.head_dim > 128
    # What is decoded takes registers, too: rather two programs of half the rows beside each other.
    is_decoded = any(side.codes.is_quantized for side in pages.sides)
    most_rows = 64 if is_wide or is_decoded else 128
    tile_rows = max(MINIMUM_ROWS, min(most_rows, 1 << (rows - 1).bit_length()))
    side_bytes = [side.words.shape[3] * side.words.dtype.itemsize for side in pages.sides]
    fitting = 1 << (TILE_BYTES // max(side_bytes)).bit_length() - 1
    tile_keys = min(max(pages.page_size, MINIMUM_KEYS), MAXIMUM_KEYS, fitting)
    tile_keys = min(tile_keys, pages.format.group or tile_keys)  # scales are the tile's
    if tile_rows == MINIMUM_ROWS:
        # Warps divide a plane's channels between them, sixteen each: of 128 channels, a plane of
        # 4-bit values has enough for two.
        slices = max(1, pages.values.shape[3] // 16)
        warps = min(4, 1 << slices.bit_length() - 1)
    else:
        # Sums of more than 128 channels, or 64 rows, would not fit in the registers of four, nor
        # beside the former what is decoded of many keys.
        warps = 8 if is_wide or tile_rows > 64 else 4
        tile_keys = min(tile_keys, MINIMUM_KEYS) if is_wide else tile_keys
    programs = batch * pages.keys.shape[1] * -(-rows // tile_rows)
    slot_bytes = sum(side_bytes)  # of a token's keys and values
    tokens = pages_per_sequence * pages.page_size
    splits = _splits(programs, tokens, tile_keys * slot_bytes, tile_keys)
    if tile_rows == MINIMUM_ROWS:
        if is_decoded:
            few = FEW_TILES if pages.residual is None else FEW_TILES // 2
            if warps < 4 or tokens > splits * tile_keys:  # four warps share a tile well
                tile_keys, splits = _share_few(programs, tokens, tile_keys, splits, slot_bytes, few)
        splits = max(splits, -(-tokens // (tile_keys * MOST_TILES)))
    splits = min(splits, MOST_SPLITS)
    only_reads = tile_rows == MINIMUM_ROWS and not is_decoded
    ahead = _ahead(programs * splits, tile_keys * slot_bytes, only_reads)
    config = AttentionConfig(tile_rows, tile_keys, splits, warps, 1 + ahead)
    return config if pages.residual is None else _with_waiting(config, pages, tokens, slot_bytes)


def _splits(
    programs: int,
    tokens: int,
    tile_bytes: int,
    tile_keys: int,
    most_bytes: int = BYTES_PER_MULTIPROCESSOR,
    most_programs: int = MOST_PROGRAMS_PER_MULTIPROCESSOR,
) -> int:
    """Programs for a sequence's tiles: where few are decoded, nothing must stay idle."""
    company = max(1, min(most_bytes // (MOST_AHEAD * tile_bytes), most_programs))
    return max(1, min(backend.multiprocessors() * company // programs, -(-tokens // tile_keys)))


def _share_few(
    programs: int, tokens: int, tile_keys: int, splits: int, slot_bytes: int, few: int
) -> tuple[int, int]:
    """Keys of a tile and splits, other ones where programs would have few tiles to decode."""
    on_their_way = MOST_AHEAD * tile_keys * slot_bytes * programs / backend.multiprocessors()
    most = min(splits, backend.multiprocessors() * SHORT_PROGRAMS // programs)
    if splits == 1 or tokens > few * most * tile_keys:
        return tile_keys, splits
    if on_their_way > ENOUGH_BYTES:
        return tile_keys, 1
    keys = min(tile_keys, MINIMUM_KEYS)
    for most_bytes in SHORT_BYTES:
        splits = _splits(programs, tokens, keys * slot_bytes, keys, most_bytes, SHORT_PROGRAMS)
        if tokens >= few * splits * keys:
            break
    return keys, splits if splits <= 16 else splits - splits % 8  # 48 are joined faster than 49


def _ahead(programs: int, tile_bytes: int, only_reads: bool) -> int:
    """Tiles that a program reads ahead. only_reads: that it waits for nothing but memory."""
    shared = backend.shared_memory(backend.compute_capability() or 9.0) - OTHER_BYTES
    neighbours = max(1.0, programs / backend.multiprocessors())
    ahead = MOST_AHEAD
    if only_reads:
        # One tile where that lets all programs run at once. Where nothing does, some run after the
        # others, which then wait for these: rather each one well ahead.
        ahead = 1 if shared // (math.ceil(neighbours) * tile_bytes) == 1 else ahead
    elif tile_bytes > SMALL_TILE_BYTES:
        ahead = min(ahead, BYTES_PER_MULTIPROCESSOR // (round(neighbours) * tile_bytes))
    return max(1, min(ahead, shared // tile_bytes))


def _with_waiting(
    config: AttentionConfig, pages: KVPages, tokens: int, slot_bytes: int
) -> AttentionConfig:
    """Tiles of 16 bits that are as large as packed ones, and a few programs that read as much."""
    assert pages.residual is not None
    token_bytes = sum(2 * side.words.shape[3] for side in pages.residual.sides)
    tile_bytes = config.tile_keys * slot_bytes
    keys = max(LEAST_WAITING_KEYS, 1 << (tile_bytes // token_bytes).bit_length() - 1)
    keys = min(keys, config.tile_keys)
    waiting = pages.residual.page_size // keys
    share = round(config.splits * waiting / max(1, -(-tokens // config.tile_keys)))
    return dataclasses.replace(
        config, waiting_keys=keys, waiting_splits=max(1, min(share, waiting, MOST_WAITING_SPLITS))
    )
