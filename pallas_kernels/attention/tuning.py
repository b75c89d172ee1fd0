"""Which configuration paged attention runs with."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from mpjax.kernels import device
from mpjax.kernels.kv_cache.cache import KVPages
from mpjax.kernels.registers import MOST_REGISTERS, registers_for

MINIMUM_ROWS = 8  # the narrow side of the tensor-core instruction
NARROW_ROWS = 16  # of a narrow tile at most; MINIMUM_ROWS where the query would move in each tile
# Narrow tiles that are faster than a wide one: of what is decoded, and of KV2's keys.
NARROW_TILES, MOST_NARROW_TILES = 2, 4
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
# Of a sequence up to which, and of a program below which, others wait for it for little time; the
# last is of keys with steps of channels.
SHORT_TOKENS, FEW_TOKENS, FEW_CHANNEL_TOKENS = 4096, 2048, 1024
# Of what a program decodes where sequences are short: it has hardly begun before it ends. Then
# tiles are smaller, bytes on their way fewer, and programs four, or as many as have eight warps.
FEW_TILES = 8
SHORT_BYTES, SHORT_PROGRAMS = 65536, 4  # per multiprocessor
FITTING_WARPS = 8  # on a multiprocessor, whose threads have LEAST_REGISTERS or ENOUGH_REGISTERS
# A tile that is only read is halved if it has more bytes, and a program no more tokens.
HALVED_BYTES, HALVED_TOKENS = 32768, 2048
ENOUGH_BYTES = 62000  # per multiprocessor, on their way to programs that share nothing
# Keys with steps of channels wait for their own instructions. So they have more programs, FEW_TILES
# are fewer, and where brief programs are many, one tile is on its way rather than two.
CHANNEL_BYTES = 196608  # per multiprocessor
# Of a thread, so that these programs fit: with fewer, each loses more than their number gains. The
# loop of two bits, the longest, has enough, but for float16 with heads of 256.
LEAST_REGISTERS, ENOUGH_REGISTERS = 192, 224
# Of brief programs that should all run at once, and of those of narrow tiles and up to 128
# channels that may help: for the loop in which they do, they would get more, and less company.
LEAST_CROWDED_REGISTERS = 168
FEW_CHANNEL_TILES = 3
BRIEF_TILES = 5  # of a program
LEAST_WAITING_KEYS = 16  # of a tile
MOST_WAITING_SPLITS = 4  # more cost more, when their results are joined, than they gain
# Brief programs should all run at once: where there is no room beside them, those of what waits
# take the place of others.
BRIEF_WAITING_TILES = 8  # of a program, if there can be as many programs
WAITING_TIME = 0.3  # of a tile, in tiles that take long to decode
OTHER_BYTES = 32768  # of shared memory: queries, and what leaves
CROSSING_BYTES = 192  # likewise, for each row of more than 128 channels, whose weights cross it


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Rows and keys in a tile, programs that share one sequence, and compiler settings.

    A tile of keys is a piece of a page, or several pages: both sizes are powers of two. What waits
    in 16 bits, in formats where something does, has smaller tiles, and programs beside those; or
    none, and those read it after what is packed.
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
    narrow_rows, most_in_narrow = _narrow_rows(pages, is_decoded=is_decoded)
    tile_rows = min(tile_rows, narrow_rows) if rows <= most_in_narrow else tile_rows
    side_bytes = [side.words.shape[3] * side.words.dtype.itemsize for side in pages.sides]
    fitting = 1 << (TILE_BYTES // max(side_bytes)).bit_length() - 1
    tile_keys = min(max(pages.page_size, MINIMUM_KEYS), MAXIMUM_KEYS, fitting)
    tile_keys = min(tile_keys, pages.format.group or tile_keys)  # scales are the tile's
    tokens = pages_per_sequence * pages.page_size
    waits = 0 if pages.residual is None else (tokens - 1) % pages.residual.page_size + 1
    work = _Work(
        programs=batch * pages.keys.shape[1] * -(-rows // tile_rows),
        tokens=tokens,
        packed_tokens=tokens - waits,
        slot_bytes=sum(side_bytes),
        other_bytes=OTHER_BYTES + (CROSSING_BYTES * tile_rows if is_wide else 0),
        is_shared_out=batch > 1 and rows <= max(tile_rows, most_in_narrow) and not is_packed,
    )
    if tile_rows <= narrow_rows:
        # Warps divide a plane's channels between them, sixteen each: of 128 channels, a plane of
        # 4-bit values has enough for two.
        slices = max(1, pages.values.shape[3] // 16)
        warps = min(4, 1 << slices.bit_length() - 1)
        return _few_rows(work, tile_rows, tile_keys, warps, pages, is_decoded=is_decoded)
    # Sums of more than 128 channels, or 64 rows, would not fit in the registers of four, nor
    # beside the former what is decoded of many keys.
    warps = 8 if is_wide or tile_rows > 64 else 4
    if is_wide:
        tile_keys = min(tile_keys, MINIMUM_KEYS)
        if tile_keys * work.slot_bytes > work.shared_memory:  # 99 KiB
            tile_keys //= 2
    splits = min(work.splits(tile_keys, work.room(tile_keys)), MOST_SPLITS)
    stages = 1 + work.ahead(tile_keys, splits)
    waiting = _Waiting.beside(tile_keys, pages, work)
    programs = waiting.programs(splits, work.tiles(tile_keys))
    return AttentionConfig(
        tile_rows,
        tile_keys,
        splits,
        warps,
        stages,
        waiting.keys,
        programs,
        is_balanced=work.may_wait(splits, FEW_TOKENS),
    )


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
        return device.shared_memory(device.compute_capability() or 9.0) - self.other_bytes

    def tiles(self, keys: int) -> int:
        """Those of a sequence, but for what waits."""
        return -(-self.packed_tokens // keys)

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
        all_programs = device.multiprocessors() * self.company(keys, most_bytes, most)
        return max(1, all_programs // self.programs)

    def splits(self, keys: int, room: int) -> int:
        """Of so many programs those for which a sequence has tiles."""
        return max(1, min(room, self.tiles(keys)))

    def may_wait(self, splits: int, few_tokens: int) -> bool:
        """Whether short sequences' programs may wait long for those of a long one."""
        is_long = self.tokens > SHORT_TOKENS and self.tokens >= few_tokens * splits
        return self.is_shared_out and is_long

    def on_their_way(self, keys: int) -> float:
        """Bytes of a multiprocessor's programs that share nothing."""
        return MOST_AHEAD * keys * self.slot_bytes * self.programs / device.multiprocessors()

    def beside(self, keys: int, splits: int, ahead: int) -> int:
        """Programs that a multiprocessor has at once, with so many tiles on their way.

        But for those of what waits, which are brief.
        """
        each = math.ceil(self.programs * splits / device.multiprocessors())
        return max(1, min(each, self.shared_memory // (ahead * keys * self.slot_bytes)))

    def ahead(self, keys: int, splits: int, *, only_reads: bool = False) -> int:
        """Tiles that a program reads ahead. only_reads: that it waits for nothing but memory."""
        tile_bytes, shared = keys * self.slot_bytes, self.shared_memory
        neighbours = max(1.0, self.programs * splits / device.multiprocessors())
        ahead = MOST_AHEAD
        if only_reads:
            # One tile where that lets all programs run at once. Where nothing does, some run after
            # the others, which then wait for these: rather each one well ahead.
            ahead = 1 if shared // (math.ceil(neighbours) * tile_bytes) == 1 else ahead
        elif tile_bytes > SMALL_TILE_BYTES:
            ahead = min(ahead, BYTES_PER_MULTIPROCESSOR // (round(neighbours) * tile_bytes))
        return max(1, min(ahead, shared // tile_bytes))


class _Waiting(NamedTuple):
    """What waits of a sequence in 16 bits, in tiles of no more bytes than packed ones have."""

    keys: int  # of a tile
    tiles: int  # 0 where nothing waits

    @classmethod
    def beside(cls, tile_keys: int, pages: KVPages, work: _Work) -> _Waiting:
        """Beside packed tiles of so many keys."""
        if pages.residual is None:
            return cls(LEAST_WAITING_KEYS, 0)
        token_bytes = sum(2 * side.words.shape[3] for side in pages.residual.sides)
        most = tile_keys * work.slot_bytes // token_bytes
        keys = min(tile_keys, max(LEAST_WAITING_KEYS, 1 << most.bit_length() - 1))
        return cls(keys, pages.residual.page_size // keys)

    def programs(self, splits: int, packed: int) -> int:
        """As many as read what each of `splits` reads of so many packed tiles."""
        return self._limited(round(splits * self.tiles / max(1, packed)))

    def brief_programs(self, splits: int, packed: int, room: int) -> int:
        """As many as are as brief as each of `splits`, or their share where there is room for."""
        time, packed = WAITING_TIME * self.tiles, max(1, packed)
        programs = min(splits * time / packed, room * time / (time + packed))
        return self._limited(max(round(programs), self.tiles // BRIEF_WAITING_TILES))

    def _limited(self, programs: int) -> int:
        return min(max(1, programs), self.tiles, MOST_WAITING_SPLITS)


class _Share(NamedTuple):
    """What programs of one sequence are like, and how many there may be."""

    keys: int  # of a tile
    warps: int
    room: int  # for programs
    is_small: bool = False  # whether tiles are, since sequences are short


def _is_slow(pages: KVPages) -> bool:
    """Whether keys are slow to decode."""
    codes = pages.format.key_codes
    return codes.scaling == "channel" or codes.bits == 2


def _narrow_rows(pages: KVPages, *, is_decoded: bool) -> tuple[int, int]:
    """The most rows of a narrow tile, and of those that such tiles read faster than a wide one."""
    codes = pages.format.key_codes
    if codes.scaling == "channel":
        tiles = MOST_NARROW_TILES if codes.bits == 2 else NARROW_TILES
        return MINIMUM_ROWS, tiles * MINIMUM_ROWS
    return NARROW_ROWS, (NARROW_TILES if is_decoded else 1) * NARROW_ROWS


def _few_rows(
    work: _Work, tile_rows: int, tile_keys: int, warps: int, pages: KVPages, *, is_decoded: bool
) -> AttentionConfig:
    has_channels = pages.format.key_codes.scaling == "channel"
    has_two_bits = pages.format.key_codes.bits == 2
    is_slow = _is_slow(pages)
    most_bytes = CHANNEL_BYTES if has_channels else BYTES_PER_MULTIPROCESSOR
    share = _Share(tile_keys, warps, work.room(tile_keys, most_bytes))
    tiles, fitting = work.tiles(tile_keys), work.room(tile_keys, most_bytes, FITTING_WARPS // warps)
    has_one_each = has_channels and tiles <= fitting
    fills = work.programs * tiles >= device.multiprocessors()
    if not is_decoded:
        share = _halved(work, share)
    elif not (has_one_each and fills and warps > 1):
        share = _shared(work, share, pages)  # else each has a tile, whose steps are loaded once
    keys, warps, room, is_small = share
    tiles, waiting = work.tiles(keys), _Waiting.beside(keys, pages, work)
    splits = work.splits(keys, room)
    if is_small and is_decoded and not is_slow and splits > 16:
        splits -= splits % 8  # 48 are joined faster than 49
    if not work.is_shared_out:
        splits = max(splits, -(-work.tokens // (keys * MOST_TILES)))
    splits = min(splits, MOST_SPLITS)
    ahead = work.ahead(keys, splits, only_reads=not is_decoded)
    is_brief = is_slow and tiles <= BRIEF_TILES * splits
    is_balanced = work.may_wait(splits, FEW_CHANNEL_TOKENS if has_channels else FEW_TOKENS)
    # Where there is no room beside a sequence's only program, nothing needs to be joined.
    reads_both = room == splits == 1 and waiting.tiles > 0 and not (is_balanced and has_channels)
    if reads_both:
        waiting_splits = 0
    elif is_brief:
        room = min(room, MOST_SPLITS)
        waiting_splits = waiting.brief_programs(splits, tiles, room)
        splits = max(1, min(splits, room - waiting_splits))
    else:
        waiting_splits = waiting.programs(splits, tiles)
    if is_small and is_slow and tiles:  # as few as have no more tiles each
        splits = math.ceil(tiles / math.ceil(tiles / splits))
    is_crowded = has_channels and is_brief and not (is_small or has_one_each or reads_both)
    ahead = 1 if is_crowded else ahead
    config = AttentionConfig(
        tile_rows,
        keys,
        splits,
        warps,
        1 + ahead,
        waiting.keys,
        waiting_splits,
        is_balanced=is_balanced,
        has_one_loop=is_balanced and has_channels and has_two_bits,
    )
    registers = _registers(work, config, pages, is_crowded=is_crowded)
    return dataclasses.replace(config, registers=registers)


def _registers(
    work: _Work, config: AttentionConfig, pages: KVPages, *, is_crowded: bool
) -> int | None:
    """That a thread may have at most, so that as many programs fit as should."""
    reads_both = pages.residual is not None and config.waiting_splits == 0
    has_two_bits = pages.format.key_codes.bits == 2
    if config.has_one_loop or (reads_both and _is_slow(pages)):
        return MOST_REGISTERS
    may_help = config.is_balanced and pages.head_dim <= 128
    if pages.format.key_codes.scaling == "channel":
        least = LEAST_CROWDED_REGISTERS if is_crowded or may_help else LEAST_REGISTERS
        least = ENOUGH_REGISTERS if has_two_bits else least
        most = registers_for(work.company(config.tile_keys, CHANNEL_BYTES), config.warps)
        return min(max(most, least), ENOUGH_REGISTERS)
    # With less than enough, the assembler knows better which loop can do with how much.
    beside = work.beside(config.tile_keys, config.splits, config.stages - 1)
    most = registers_for(beside, config.warps)
    if may_help:
        most = max(most, LEAST_CROWDED_REGISTERS)
    return most if may_help or most >= ENOUGH_REGISTERS else None


def _halved(work: _Work, share: _Share) -> _Share:
    """Half as large tiles, and half as many warps, if programs have few that are only read."""
    is_large = share.keys > MINIMUM_KEYS and share.keys * work.slot_bytes > HALVED_BYTES
    if not is_large or work.tokens > HALVED_TOKENS * work.splits(share.keys, share.room):
        return share
    return _Share(share.keys // 2, share.warps // 2, share.room, is_small=True)


def _shared(work: _Work, share: _Share, pages: KVPages) -> _Share:
    """Smaller tiles and other programs, if these would have few tiles to decode."""
    splits = work.splits(share.keys, share.room)
    has_channels = pages.format.key_codes.scaling == "channel"
    if splits == 1 and not has_channels:
        return share._replace(keys=_keys_of_one(work, share.keys, share.warps))
    if pages.format.value_codes.scaling == "channel":
        return share  # halves of a tile would have the same steps, of values, too
    if share.warps == 4 and not has_channels and work.tiles(share.keys) <= splits:
        return share  # four share a tile well
    few = FEW_TILES if pages.residual is None else FEW_TILES // 2
    few = FEW_CHANNEL_TILES if has_channels else few
    most = min(splits, device.multiprocessors() * SHORT_PROGRAMS // work.programs)
    if splits == 1 or work.tokens > few * most * share.keys:
        return share
    if work.on_their_way(share.keys) > ENOUGH_BYTES:
        return share._replace(room=1)
    keys = min(share.keys, MINIMUM_KEYS)
    company = max(SHORT_PROGRAMS, FITTING_WARPS // share.warps)
    return _Share(keys, share.warps, work.room(keys, SHORT_BYTES, company), is_small=True)


def _keys_of_one(work: _Work, tile_keys: int, warps: int) -> int:
    """Keys of a tile where each program decodes a sequence: half as many, if that gains."""
    half = min(tile_keys, max(tile_keys // 2, MINIMUM_KEYS))
    fits, half_fits = (
        work.programs <= device.multiprocessors() * work.company(keys) for keys in (tile_keys, half)
    )
    if warps < 4:  # where only then all run at once, none of them with too many tiles
        gains = half_fits and not fits and work.tiles(half) <= MOST_TILES
        return half if gains else tile_keys
    is_short = work.tiles(tile_keys) <= FEW_TILES
    return half if fits and is_short and work.on_their_way(half) > ENOUGH_BYTES else tile_keys
