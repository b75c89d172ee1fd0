"""Which configuration paged attention runs with."""

from __future__ import annotations

from pallas_kernels import backend
from pallas_kernels.attention.triton import AttentionConfig
from pallas_kernels.kv_cache.cache import KVPages

MINIMUM_ROWS = 8  # the narrow side of the tensor-core instruction
MINIMUM_KEYS, MAXIMUM_KEYS = 64, 128  # of a tile, whatever the page size
TILE_BYTES = 32768  # of keys or values at most: a tile of both fits the smallest shared memory
# Found on the H200, from KV4 to KV16: more programs cost more, when their results are joined, than
# they gain; fewer bytes on their way, of a program or of all on a multiprocessor, leave it waiting.
MOST_PROGRAMS_PER_MULTIPROCESSOR = 4
BYTES_PER_MULTIPROCESSOR = 131072
BYTES_IN_FLIGHT = 65536
LEAST_AHEAD, MOST_AHEAD = 2, 5  # tiles
OTHER_BYTES = 32768  # of shared memory: queries, and what leaves


def configure(batch: int, rows: int, pages_per_sequence: int, pages: KVPages) -> AttentionConfig:
    """A sound configuration for `rows` (token, head) pairs of each sequence and KV head."""
    is_wide = pages.head_dim > 128
    # What is decoded takes registers, too: rather two programs of half the rows beside each other.
    is_decoded = any(side.codes.is_quantized for side in pages.sides)
    most_rows = 64 if is_wide or is_decoded else 128
    tile_rows = max(MINIMUM_ROWS, min(most_rows, 1 << (rows - 1).bit_length()))
    slot_bytes = max(side.words.shape[3] * side.words.dtype.itemsize for side in pages.sides)
    fitting = 1 << (TILE_BYTES // slot_bytes).bit_length() - 1
    tile_keys = min(max(pages.page_size, MINIMUM_KEYS), MAXIMUM_KEYS, fitting)
    tile_keys = min(tile_keys, pages.format.group or tile_keys)  # scales are the tile's
    if tile_rows == MINIMUM_ROWS:
        # Warps divide a plane's channels between them, sixteen each: of 128 channels, a plane of
        # 4-bit values has enough for two.
        slices = max(1, pages.values.shape[3] // 16)
        warps = min(4, max(2, 1 << slices.bit_length() - 1))
    else:
        # Sums of more than 128 channels, or 64 rows, would not fit in the registers of four, nor
        # beside the former what is decoded of many keys.
        warps = 8 if is_wide or tile_rows > 64 else 4
        tile_keys = min(tile_keys, MINIMUM_KEYS) if is_wide else tile_keys
    programs = batch * pages.keys.shape[1] * -(-rows // tile_rows)
    # Decoding a few long sequences would leave multiprocessors idle: share out each one's tiles.
    tile_bytes = tile_keys * sum(
        side.words.shape[3] * side.words.dtype.itemsize for side in pages.sides
    )
    company = min(BYTES_PER_MULTIPROCESSOR // tile_bytes, MOST_PROGRAMS_PER_MULTIPROCESSOR)
    wanted = backend.multiprocessors() * max(1, company)
    tiles = -(-pages_per_sequence * pages.page_size // tile_keys)
    splits = max(1, min(wanted // programs, tiles, 64))
    # A load is `stages` − 1 tiles ahead of its use, if there is room for them.
    shared = backend.shared_memory(backend.compute_capability() or 9.0) - OTHER_BYTES
    ahead = max(LEAST_AHEAD, min(BYTES_IN_FLIGHT // tile_bytes, MOST_AHEAD))
    stages = 1 + max(1, min(ahead, shared // tile_bytes))
    return AttentionConfig(tile_rows, tile_keys, splits, warps, stages)
