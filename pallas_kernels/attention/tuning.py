"""Which configuration paged attention runs with."""

from __future__ import annotations

from pallas_kernels import backend
from pallas_kernels.attention.triton import AttentionConfig

MINIMUM_ROWS = 16  # of the tensor-core instruction


def configure(batch: int, kv_heads: int, rows: int, pages_per_sequence: int) -> AttentionConfig:
    """A sound configuration for `rows` (token, head) pairs of each sequence and KV head."""
    tile_rows = max(MINIMUM_ROWS, min(64, 1 << (rows - 1).bit_length()))
    programs = batch * kv_heads * -(-rows // tile_rows)
    # Decoding a few long sequences would leave multiprocessors idle: share each sequence's pages
    # out until every one has four programs to overlap.
    wanted = 4 * backend.multiprocessors()
    splits = max(1, min(wanted // programs, pages_per_sequence, 64))
    return AttentionConfig(tile_rows, splits, warps=4, stages=2)
