"""Which configuration paged attention runs with."""

from __future__ import annotations

from pallas_kernels import backend
from pallas_kernels.attention.triton import AttentionConfig
from pallas_kernels.kv_cache.cache import KVFormat

MINIMUM_ROWS = 8  # the narrow side of the tensor-core instruction
WARPS_PER_MULTIPROCESSOR = 16  # that overlap each other's loads


def configure(
    batch: int, kv_heads: int, rows: int, pages_per_sequence: int, format: KVFormat
) -> AttentionConfig:
    """A sound configuration for `rows` (token, head) pairs of each sequence and KV head."""
    tile_rows = max(MINIMUM_ROWS, min(64, 1 << (rows - 1).bit_length()))
    # With few rows, warps divide a plane's channels between them, sixteen each: a plane of KV4 has
    # enough for two.
    warps = 2 if format.bits == 4 and tile_rows == MINIMUM_ROWS else 4
    programs = batch * kv_heads * -(-rows // tile_rows)
    # Decoding a few long sequences would leave multiprocessors idle: share out each one's pages.
    wanted = backend.multiprocessors() * WARPS_PER_MULTIPROCESSOR // warps
    splits = max(1, min(wanted // programs, pages_per_sequence, 64))
    return AttentionConfig(tile_rows, splits, warps, stages=2)
