"""Which configuration paged attention runs with."""

from __future__ import annotations

import dataclasses
import math

from pallas_kernels import backend
from pallas_kernels.kv_cache.cache import KVPages
from pallas_kernels.registers import MOST_REGISTERS, registers_for

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
MOST_TILES = 64  # of a program that no other helps, or of small tiles
# Of a sequence and of a program, the latter of keys with steps of channels last: with no more, it
# keeps others waiting for little time.
SHORT_TOKENS, FEW_TOKENS, FEW_CHANNEL_TOKENS = 4096, 2048, 1024
# Of what a program decodes where sequences are short: it has hardly begun before it ends. Then
# tiles are smaller, bytes on their way fewer, and programs four, or those of one warp eight.
FEW_TILES = 8
SHORT_BYTES, SHORT_PROGRAMS, SHORT_WARPS = 65536, 4, 8  # per multiprocessor
FEW_BYTES = 32768  # of a tile that is only read, by programs of few tokens
ENOUGH_BYTES = 62000  # per multiprocessor, on their way to programs that share nothing
# Keys with steps of channels wait for their own instructions. So they have more programs, FEW_TILES
# are fewer, and one tile is on its way rather than two where a program has few.
CHANNEL_BYTES = 196608  # per multiprocessor
# Of a thread, so that these programs fit: with fewer, each loses more than their number gains. The
# loop of two bits, the longest, has enough, but for float16 with heads of 256.
LEAST_REGISTERS, ENOUGH_REGISTERS = 192, 224
# Of programs that should all run at once, and of those of eight rows and up to 128 channels that
# may help: for the loop in which they do, they would get more, and less company.
LEAST_CROWDED_REGISTERS = 168
FEW_CHANNEL_TILES = 3
BRIEF_TILES = 5  # of a program
LEAST_WAITING_KEYS = 16  # of a tile
MOST_WAITING_SPLITS = 4  # more cost more, when their results are joined, than they gain
# Brief programs should all run at once: those of what waits take the place of others.
BRIEF_WAITING_TILES = 8  # of a program, if there can be as many programs
WAITING_TIME = 0.3  # of a tile, in tiles with steps of channels
OTHER_BYTES = 32768  # of shared memory: queries, and what leaves
CROSSING_BYTES = 192  # likewise, for each row of more than 128 channels, whose weights cross it


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Rows and keys in a tile, programs that share one sequence, and compiler settings.

    A tile of keys is a piece of a page, or several pages: both sizes are powers of two. What waits
    in 16 bits, in formats where something does, has smaller tiles and programs beside those.
    registers: that a thread may have at most, or None for what the assembler finds.
    is_balanced: that programs of short sequences help where others are long (`balance`); they must
        be padded.
    has_one_loop: that programs which may help read own tiles and others' in one loop, not in two.
    """

    tile_rows: int
    tile_keys: int
    splits: int
    warps: int
    stages: int
    waiting_keys: int = LEAST_WAITING_KEYS
    waiting_splits: int = 0
    registers: int | None = None
    is_balanced: bool = False
    has_one_loop: bool = False

    @property
    def programs(self) -> int:
        """Of one sequence: those of what is packed, and those of what waits."""
        return self.splits + self.waiting_splits


def configure(
    batch: int, rows: int, pages_per_sequence: int, pages: KVPages, *, is_packed: bool = False
) -> AttentionConfig:
    """A sound configuration for `rows` (token, head) pairs of each sequence and KV head.

    is_packed: that queries stand one sequence after another, without padding.
    """
    is_wide = pages.head_dim > 128
    # What is decoded takes registers, too: rather two programs of half the rows beside each other.
    is_decoded = any(side.codes.is_quantized for side in pages.sides)
    most_rows = 64 if is_wide or is_decoded else 128
    tile_rows = max(MINIMUM_ROWS, min(most_rows, 1 << (rows - 1).bit_length()))
    side_bytes = [side.words.shape[3] * side.words.dtype.itemsize for side in pages.sides]
    fitting = 1 << (TILE_BYTES // max(side_bytes)).bit_length() - 1
    tile_keys = min(max(pages.page_size, MINIMUM_KEYS), MAXIMUM_KEYS, fitting)
    tile_keys = min(tile_keys, pages.format.group or tile_keys)  # scales are the tile's
    tokens = pages_per_sequence * pages.page_size
    block = 1 if pages.residual is None else pages.residual.page_size
    work = _Work(
        programs=batch * pages.keys.shape[1] * -(-rows // tile_rows),
        tokens=tokens,
        packed_tokens=tokens if block == 1 else (tokens - 1) // block * block,
        slot_bytes=sum(side_bytes),
        other_bytes=OTHER_BYTES + (CROSSING_BYTES * tile_rows if is_wide else 0),
        is_shared_out=batch > 1 and rows <= tile_rows and not is_packed,
    )
    if tile_rows == MINIMUM_ROWS:
        # Warps divide a plane's channels between them, sixteen each: of 128 channels, a plane of
        # 4-bit values has enough for two.
        slices = max(1, pages.values.shape[3] // 16)
        warps = min(4, 1 << slices.bit_length() - 1)
        return _few_rows(work, tile_keys, warps, pages, is_decoded=is_decoded)
    # Sums of more than 128 channels, or 64 rows, would not fit in the registers of four, nor
    # beside the former what is decoded of many keys.
    warps = 8 if is_wide or tile_rows > 64 else 4
    if is_wide:
        tile_keys = min(tile_keys, MINIMUM_KEYS)
        if tile_keys * work.slot_bytes > work.shared_memory:  # 99 KiB
            tile_keys //= 2
    splits = min(work.splits(tile_keys, work.room(tile_keys)), MOST_SPLITS)
    stages = 1 + work.ahead(tile_keys, splits)
    config = AttentionConfig(tile_rows, tile_keys, splits, warps, stages)
    config = dataclasses.replace(config, is_balanced=work.may_wait(splits))
    return _with_waiting(config, pages, work)


@dataclasses.dataclass(frozen=True)
class _Work:
    """What there is to do: programs, were no sequence shared, tokens of each, bytes of a token.

    packed_tokens: those that don't wait.
    is_shared_out: that there are several sequences, padded to few tokens each.
    """

    programs: int
    tokens: int
    packed_tokens: int
    slot_bytes: int
    other_bytes: int = OTHER_BYTES
    is_shared_out: bool = False

    @property
    def shared_memory(self) -> int:
        """Bytes of a multiprocessor's that tiles may have."""
        return backend.shared_memory(backend.compute_capability() or 9.0) - self.other_bytes

    def tiles(self, keys: int) -> int:
        """Those of a sequence, but for what waits."""
        return -(-self.packed_tokens // keys)

    def has_one_each(self, keys: int, room: int) -> bool:
        """Whether programs have one tile each, and every multiprocessor a program."""
        tiles = self.tiles(keys)
        return tiles <= room and self.programs * tiles >= backend.multiprocessors()

    def company(
        self,
        keys: int,
        most_bytes: int = BYTES_PER_MULTIPROCESSOR,
        most: int = MOST_PROGRAMS_PER_MULTIPROCESSOR,
    ) -> int:
        """Programs that a multiprocessor should have, each with tiles of so many keys."""
        return max(1, min(most_bytes // (MOST_AHEAD * keys * self.slot_bytes), most))

    def room(
        self,
        keys: int,
        most_bytes: int = BYTES_PER_MULTIPROCESSOR,
        most: int = MOST_PROGRAMS_PER_MULTIPROCESSOR,
    ) -> int:
        """Programs for a sequence: where few are decoded, nothing must stay idle."""
        all_programs = backend.multiprocessors() * self.company(keys, most_bytes, most)
        return max(1, all_programs // self.programs)

    def splits(self, keys: int, room: int) -> int:
        """Of so many programs those for which a sequence has tiles."""
        return max(1, min(room, self.tiles(keys)))

    def may_wait(self, splits: int, few_tokens: int = FEW_TOKENS) -> bool:
        """Whether short sequences' programs may wait long for those of a long one."""
        is_long = self.tokens > SHORT_TOKENS and self.tokens >= few_tokens * splits
        return self.is_shared_out and is_long

    def on_their_way(self, keys: int) -> float:
        """Bytes of a multiprocessor's programs that share nothing."""
        return MOST_AHEAD * keys * self.slot_bytes * self.programs / backend.multiprocessors()

    def beside(self, keys: int, splits: int, ahead: int) -> int:
        """Programs that a multiprocessor has at once, with so many tiles on their way.

        But for those of what waits, which are brief.
        """
        each = math.ceil(self.programs * splits / backend.multiprocessors())
        return max(1, min(each, self.shared_memory // (ahead * keys * self.slot_bytes)))

    def ahead(self, keys: int, splits: int, *, only_reads: bool = False) -> int:
        """Tiles that a program reads ahead. only_reads: that it waits for nothing but memory."""
        tile_bytes, shared = keys * self.slot_bytes, self.shared_memory
        neighbours = max(1.0, self.programs * splits / backend.multiprocessors())
        ahead = MOST_AHEAD
        if only_reads:
            # One tile where that lets all programs run at once. Where nothing does, some run after
            # the others, which then wait for these: rather each one well ahead.
            ahead = 1 if shared // (math.ceil(neighbours) * tile_bytes) == 1 else ahead
        elif tile_bytes > SMALL_TILE_BYTES:
            ahead = min(ahead, BYTES_PER_MULTIPROCESSOR // (round(neighbours) * tile_bytes))
        return max(1, min(ahead, shared // tile_bytes))


def _few_rows(
    work: _Work, tile_keys: int, warps: int, pages: KVPages, *, is_decoded: bool
) -> AttentionConfig:
    has_channels = pages.format.key_codes.scaling == "channel"
    most_bytes = CHANNEL_BYTES if has_channels else BYTES_PER_MULTIPROCESSOR
    room = work.room(tile_keys, most_bytes)
    keys, room, warps = _share(work, tile_keys, room, warps, pages, is_decoded=is_decoded)
    splits, tiles = work.splits(keys, room), work.tiles(keys)
    if keys < tile_keys and tiles:  # as few as have no more tiles each
        splits = math.ceil(tiles / math.ceil(tiles / splits))
    if not work.is_shared_out:
        splits = max(splits, -(-work.tokens // (keys * MOST_TILES)))
    splits = min(splits, MOST_SPLITS)
    ahead = work.ahead(keys, splits, only_reads=not is_decoded)
    is_brief = tiles <= BRIEF_TILES * splits
    # Programs of one tile leave memory and registers, and so do those of small tiles.
    is_crowded = has_channels and is_brief and keys == tile_keys and splits < tiles
    ahead = 1 if is_crowded else ahead
    few_tokens = FEW_CHANNEL_TOKENS if has_channels else FEW_TOKENS
    config = AttentionConfig(MINIMUM_ROWS, keys, splits, warps, 1 + ahead)
    config = dataclasses.replace(config, is_balanced=work.may_wait(splits, few_tokens))
    config = _with_waiting(config, pages, work, room=min(room, MOST_SPLITS) if is_brief else None)
    may_help = config.is_balanced and pages.head_dim <= 128
    if has_channels:
        has_long_loop = pages.format.key_codes.bits == 2
        if has_long_loop and config.is_balanced:
            return dataclasses.replace(config, has_one_loop=True, registers=MOST_REGISTERS)
        least = LEAST_CROWDED_REGISTERS if is_crowded or may_help else LEAST_REGISTERS
        least = ENOUGH_REGISTERS if has_long_loop else least
        most = registers_for(work.company(keys, most_bytes), warps)
        return dataclasses.replace(config, registers=min(max(most, least), ENOUGH_REGISTERS))
    # With less than enough, the assembler knows better which loop can do with how much.
    most = registers_for(work.beside(keys, config.splits, ahead), warps)
    if may_help:
        most = max(most, LEAST_CROWDED_REGISTERS)
    is_limited = may_help or most >= ENOUGH_REGISTERS
    return dataclasses.replace(config, registers=most if is_limited else None)


def _share(
    work: _Work, tile_keys: int, room: int, warps: int, pages: KVPages, *, is_decoded: bool
) -> tuple[int, int, int]:
    """Keys of a tile, programs that there is room for, and warps of each.

    Others than those given where programs would have few tiles.
    """
    splits = work.splits(tile_keys, room)
    has_channels = pages.format.key_codes.scaling == "channel"
    if not is_decoded:
        is_large = tile_keys > MINIMUM_KEYS and tile_keys * work.slot_bytes > FEW_BYTES
        if is_large and work.tokens <= FEW_TOKENS * splits:
            return tile_keys // 2, room, max(1, warps // 2)
        return tile_keys, room, warps
    if splits == 1 and not has_channels:
        return _keys_of_one(work, tile_keys, warps), 1, warps
    if pages.format.value_codes.scaling == "channel":
        # Each tile has steps of its own for values, too: smaller ones would be more of them.
        return tile_keys, room, warps
    if has_channels and warps > 1 and work.has_one_each(tile_keys, room):
        return tile_keys, room, warps  # likewise for keys, if two warps share a tile anyway
    if warps == 4 and work.tokens <= splits * tile_keys:
        return tile_keys, room, warps  # four share a tile well
    few = FEW_TILES if pages.residual is None else FEW_TILES // 2
    few = FEW_CHANNEL_TILES if has_channels else few
    return *_share_few(work, tile_keys, room, few, warps), warps


def _keys_of_one(work: _Work, tile_keys: int, warps: int) -> int:
    """Keys of a tile where each program decodes a sequence: half as many, if that gains."""
    half = min(tile_keys, max(tile_keys // 2, MINIMUM_KEYS))
    fits, half_fits = (
        work.programs <= backend.multiprocessors() * work.company(keys)
        for keys in (tile_keys, half)
    )
    if warps < 4:  # where only then all run at once, none of them with too many tiles
        gains = half_fits and not fits and work.tiles(half) <= MOST_TILES
        return half if gains else tile_keys
    is_short = work.tiles(tile_keys) <= FEW_TILES
    return half if fits and is_short and work.on_their_way(half) > ENOUGH_BYTES else tile_keys


def _share_few(work: _Work, tile_keys: int, room: int, few: int, warps: int) -> tuple[int, int]:
    """Keys of a tile and programs, others where these would have few tiles to decode."""
    splits = work.splits(tile_keys, room)
    most = min(splits, backend.multiprocessors() * SHORT_PROGRAMS // work.programs)
    if splits == 1 or work.tokens > few * most * tile_keys:
        return tile_keys, room
    if work.on_their_way(tile_keys) > ENOUGH_BYTES:
        return tile_keys, 1
    keys = min(tile_keys, MINIMUM_KEYS)
    return keys, work.room(keys, SHORT_BYTES, max(SHORT_PROGRAMS, SHORT_WARPS // warps))


def _with_waiting(
    config: AttentionConfig, pages: KVPages, work: _Work, *, room: int | None = None
) -> AttentionConfig:
    """Tiles of 16 bits that are as large as packed ones, and a few programs that read as much.

    room: for programs of a sequence that have few tiles each. Those of what waits must then be as
        brief, and take the place of others, of which one is left at least.
    """
    if pages.residual is None:
        return config
    token_bytes = sum(2 * side.words.shape[3] for side in pages.residual.sides)
    tile_bytes = config.tile_keys * work.slot_bytes
    keys = max(LEAST_WAITING_KEYS, 1 << (tile_bytes // token_bytes).bit_length() - 1)
    keys = min(keys, config.tile_keys)
    waiting, packed = pages.residual.page_size // keys, max(1, work.tiles(config.tile_keys))
    splits, share = config.splits, round(config.splits * waiting / packed)
    if room is not None:
        time = WAITING_TIME * waiting
        share = round(min(splits * time / packed, room * time / (time + packed)))
        share = max(share, waiting // BRIEF_WAITING_TILES)
    share = max(1, min(share, waiting, MOST_WAITING_SPLITS))
    if room is not None:
        splits = max(1, min(splits, room - share))
    return dataclasses.replace(config, splits=splits, waiting_keys=keys, waiting_splits=share)
