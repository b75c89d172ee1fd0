"""KV formats and the cache that they fill: pages, block tables and lengths, as a pytree."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels import bits as bit_planes

PAGE_SIZES = (64, 128)


@dataclasses.dataclass(frozen=True)
class KVFormat:
    """How keys and values are stored: KV16 as they are, KV8 and KV4 as codes.

    KV8 and KV4 are TurboMind's: per token and head, asymmetric, x ≈ code · scale + zero with
    scale = (max − min) / (2**bits − 1) and zero = min, keys after the rotary embedding.
    """

    bits: int = 16

    def __post_init__(self) -> None:
        if self.bits not in (4, 8, 16):
            raise ValueError(f"KV{self.bits} is not a KV format: expected KV16, KV8 or KV4")

    @classmethod
    def parse(cls, text: str) -> KVFormat:
        """Reads `KV16`, `KV8` or `KV4`."""
        if not (text.startswith("KV") and text[2:].isdigit()):
            raise ValueError(f"can't read the KV format {text!r}: expected KV16, KV8 or KV4")
        return cls(int(text[2:]))

    def __str__(self) -> str:
        return f"KV{self.bits}"

    @property
    def is_quantized(self) -> bool:
        """Whether pages hold codes rather than values."""
        return self.bits < 16

    @property
    def planes(self) -> int:
        """Codes in a 16-bit word; plane j holds the j-th slice of the head dimension."""
        return bit_planes.planes_per_word(self.bits)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "values", "key_parameters", "value_parameters"],
    meta_fields=["format"],
)
@dataclasses.dataclass(frozen=True)
class KVPages:
    """The pages of one layer.

    keys, values: [pages, KV heads, page size, head dim] in the compute dtype for KV16, else uint16
        words [pages, KV heads, page size, head dim / planes]: bits j·b … of word w are channel
        j · head_dim / planes + w.
    key_parameters, value_parameters: uint32 [pages, KV heads, page size], the scale below the
        zero, each 16 bits; None for KV16.
    """

    keys: jax.Array
    values: jax.Array
    key_parameters: jax.Array | None
    value_parameters: jax.Array | None
    format: KVFormat

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.keys.shape[2]

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.keys.shape[3] * self.format.planes


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["layers", "block_tables", "lengths"],
    meta_fields=["format"],
)
@dataclasses.dataclass(frozen=True)
class PagedKVCache:
    """Keys and values of a batch of sequences, in pages that block tables assign.

    layers: one KVPages for each decoder layer.
    block_tables: int32 [batch, pages per sequence]; entry p is the page of tokens
        p · page_size … of that sequence, in every layer.
    lengths: int32 [batch], tokens that each sequence holds.

    A cache is a value: functions take one and return the next. Donate it to `jit` so that the
    next takes over its buffers.
    """

    layers: tuple[KVPages, ...]
    block_tables: jax.Array
    lengths: jax.Array
    format: KVFormat

    @classmethod
    def create(
        cls,
        *,
        layers: int,
        batch: int,
        max_tokens: int,
        kv_heads: int,
        head_dim: int,
        format: KVFormat = KVFormat(),
        page_size: int = 128,
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
    ) -> PagedKVCache:
        """An empty cache in which each of `batch` sequences can hold `max_tokens` tokens.

        Capacity is rounded up to whole pages. dtype: of KV16's values; for KV8 and KV4 scales and
        zeros are bfloat16 if it is bfloat16, else float16.
        """
        if page_size not in PAGE_SIZES:
            raise ValueError(f"page size {page_size}: expected one of {PAGE_SIZES}")
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}: a cache holds at least one token")
        if head_dim % format.planes:
            raise ValueError(f"{format} needs a head dimension divisible by {format.planes}")
        pages_per_sequence = -(-max_tokens // page_size)
        pages = batch * pages_per_sequence
        shape = (pages, kv_heads, page_size, head_dim // format.planes)
        storage = jnp.uint16 if format.is_quantized else dtype

        def layer() -> KVPages:
            # Each buffer its own: a buffer that appears twice can't be donated.
            keys, values = (jnp.zeros(shape, storage) for _ in range(2))
            if not format.is_quantized:
                return KVPages(keys, values, None, None, format)
            scales = [jnp.zeros(shape[:3], jnp.uint32) for _ in range(2)]
            return KVPages(keys, values, scales[0], scales[1], format)

        return cls(
            tuple(layer() for _ in range(layers)),
            jnp.arange(pages, dtype=jnp.int32).reshape(batch, pages_per_sequence),
            jnp.zeros(batch, jnp.int32),
            format,
        )

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.layers[0].page_size

    @property
    def capacity(self) -> int:
        """Tokens that each sequence can hold."""
        return self.block_tables.shape[1] * self.page_size

    @property
    def nbytes(self) -> int:
        """Bytes in device memory."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def require_room(self, tokens: int | jax.Array) -> None:
        """Raises ValueError if `tokens` more (for all sequences, or for each) don't fit.

        Reads lengths back from the device. Under `jit` nothing is known, and nothing refused.
        """
        if any(isinstance(x, jax.core.Tracer) for x in (self.lengths, tokens)):
            return
        needed = int(jnp.max(self.lengths + jnp.asarray(tokens, jnp.int32)))
        if needed > self.capacity:
            raise ValueError(
                f"the KV cache holds {self.capacity} tokens per sequence, but {needed} are "
                f"needed; create it with max_tokens={needed} or ask for fewer tokens"
            )
