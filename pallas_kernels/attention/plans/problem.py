"""The problem of attention over the paged cache: the sizes that its plan depends on."""

from __future__ import annotations

import dataclasses

from mpjax.kernels import device
from mpjax.kernels.device import Limits
from mpjax.kernels.kv_cache.cache import KVPages
from mpjax.kernels.kv_cache.formats import KVFormat


@dataclasses.dataclass(frozen=True)
class CacheShape:
    """The format and sizes of a layer's pages.

    format: of keys and values. kv_heads, head_dim: heads, and channels of each.
    page_size: tokens of a page.
    """

    format: KVFormat
    kv_heads: int
    head_dim: int
    page_size: int = 128

    @classmethod
    def of(cls, pages: KVPages) -> CacheShape:
        """The shape of one layer's pages."""
        return cls(pages.format, pages.keys.shape[1], pages.head_dim, pages.page_size)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Attention of new tokens over the pages of a batch, on a GPU with these limits.

    batch: number of sequences.
    rows: the number of pairs of a new token and a query head that share one KV head, of one
        sequence, or of all sequences together if varlen.
    tokens: the capacity of each sequence, by its block table.
    cache: the pages.
    limits: of the GPU.
    is_varlen: whether the queries of sequences follow one another, without padding.
    """

    batch: int
    rows: int
    tokens: int
    cache: CacheShape
    limits: Limits
    is_varlen: bool = False

    @classmethod
    def of(
        cls,
        rows: int,
        pages: KVPages,
        block_tables_shape: tuple[int, ...],
        *,
        is_varlen: bool = False,
    ) -> Problem:
        """The problem of attention over these pages on the default device.

        block_tables_shape: [batch, pages per sequence].
        """
        batch, entries = block_tables_shape
        tokens = entries * pages.page_size
        return cls(batch, rows, tokens, CacheShape.of(pages), device.limits(), is_varlen)

    @property
    def side_bytes(self) -> tuple[int, int]:
        """Bytes of a token's key, and of its value, without scales."""
        kinds = self.cache.format.key_codes, self.cache.format.value_codes
        keys, values = (2 * (self.cache.head_dim // codes.planes) for codes in kinds)
        return keys, values

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's key and value, without scales."""
        return sum(self.side_bytes)

    @property
    def is_decoded(self) -> bool:
        """Whether keys or values are codes."""
        format = self.cache.format
        return format.key_codes.is_quantized or format.value_codes.is_quantized

    @property
    def has_channel_keys(self) -> bool:
        """Whether key channels have scales, which multiply the queries again for each tile."""
        return self.cache.format.key_codes.scaling == "channel"

    @property
    def has_slow_keys(self) -> bool:
        """Whether decoding keys takes longer than loading them from memory."""
        return self.has_channel_keys or self.has_two_bit_keys

    @property
    def has_two_bit_keys(self) -> bool:
        """Whether keys are two-bit codes, which take the most instructions to decode."""
        return self.cache.format.key_codes.bits == 2

    @property
    def residual(self) -> int:
        """The number of tokens of a full 16-bit residual; 0 for formats without one."""
        return self.cache.format.block or 0

    @property
    def packed_tokens(self) -> int:
        """The number of tokens of a full sequence that are codes, outside the residual."""
        return self.tokens - ((self.tokens - 1) % self.residual + 1 if self.residual else 0)

    def programs(self, tile_rows: int) -> int:
        """The number of programs of all sequences if keys are not split.

        Any of the varlen sequences may have all rows, while the others have none.
        """
        sequences = 1 if self.is_varlen else self.batch
        return sequences * self.cache.kv_heads * -(-self.rows // tile_rows)

    def tiles(self, tile_keys: int) -> int:
        """The number of tiles of a full sequence's packed keys."""
        return -(-self.packed_tokens // tile_keys)
