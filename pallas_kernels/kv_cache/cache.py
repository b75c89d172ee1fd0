"""The cache: pages, block tables and lengths, as a pytree."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels.checks import as_array, is_known, require_type, shown, whole_number
from mpjax.kernels.kv_cache.codes import KVCodes
from mpjax.kernels.kv_cache.formats import KVFormat
from mpjax.kernels.kv_cache.layout import KVLayout


class Side(NamedTuple):
    """The keys, or the values, of one layer's pages; in a kernel, references to them."""

    words: Any
    parameters: Any
    codes: KVCodes
    parameter_dtype: Any  # of the scales and zeros that they keep, if they do


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "values", "key_parameters", "value_parameters", "residual"],
    meta_fields=["format", "parameter_dtype"],
)
@dataclasses.dataclass(frozen=True)
class KVPages:
    """The pages of one layer.

    What stands in a page behind its sequence's length must be finite, since attention gives it the
    weight zero: clear a page that holds anything else before another sequence takes it over.

    keys, values: [pages, KV heads, page size, head dim] in the compute dtype where they are stored
        as they are, else uint16 words [pages, KV heads, page size, head dim / planes]: code j of
        word w is channel j · head dim / planes + w. Channels are those of the Hadamard transform
        where the codes of keys say so (KVCodes.hadamard).
    key_parameters, value_parameters: uint32, the scale below the zero, each 16 bits, where tokens
        have them [pages, KV heads, page size], and where channels do [pages, KV heads, groups of
        tokens, head dim]; where scales are given, these, float32, of FP8 [KV heads], and of 8s [KV
        heads, head dim]; else None.
    residual: where the format has blocks, 16-bit pages of the size of one, page b for row b of the
        batch: of the last block that sequence b has begun, they hold all tokens, at their positions
        in it. A block is encoded into the other pages when the first token behind it comes. Row b
        must remain the same sequence, and its length must not shrink but to 0. Else None.
    parameter_dtype: "bfloat16" or "float16", what scales and zeros of tokens and channels are,
        whatever the dtype of keys and values that are appended, and of queries; a kernel attends
        with queries of this dtype. Those of keys' channels are float16 all the same. None where
        there are none.
    """

    keys: jax.Array
    values: jax.Array
    key_parameters: jax.Array | None
    value_parameters: jax.Array | None
    format: KVFormat
    residual: KVPages | None = None
    parameter_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.format.keeps_scales and self.parameter_dtype not in ("bfloat16", "float16"):
            raise ValueError(
                f"KVPages: parameter_dtype is {self.parameter_dtype!r}: expected 'bfloat16' or "
                f"'float16', what the scales of {self.format} are"
            )

    @property
    def sides(self) -> tuple[Side, Side]:
        """Keys and values, each with its parameters and its kind of codes."""
        kinds = self.format.key_codes, self.format.value_codes
        # Steps of keys' channels meet queries in float16 (attention/queries.py).
        of_keys = "float16" if kinds[0].scaling == "channel" else self.parameter_dtype
        return (
            Side(self.keys, self.key_parameters, kinds[0], of_keys),
            Side(self.values, self.value_parameters, kinds[1], self.parameter_dtype),
        )

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.keys.shape[2]

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.keys.shape[3] * self.format.key_codes.planes


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
        layout: KVLayout,
        *,
        layers: int,
        batch: int,
        max_tokens: int,
        scales: jax.typing.ArrayLike | None = None,
    ) -> PagedKVCache:
        """An empty cache in which each of `batch` sequences can hold `max_tokens` tokens.

        Capacity is rounded up to whole pages.
        layout: of every layer: its heads, and the format and size of its pages.
        scales: where the format is given some, positive, keys first. Of FP8 (a checkpoint's
            k_scale and v_scale) they broadcast to [layers, 2, KV heads], and 1, which reaches up to
            448, is the default; of 8s to [layers, 2, KV heads, head dim] (`cache_scales`), and
            there is no default.

        Raises ValueError for sizes and scales that there can't be.
        """
        require_type("PagedKVCache: layout", layout, KVLayout)
        layers, batch = whole_number("layers", layers), whole_number("batch", batch)
        max_tokens = whole_number("max_tokens", max_tokens)
        each = _broadcast_scales(scales, layers, layout)
        pages_per_sequence = -(-max_tokens // layout.page_size)
        pages = batch * pages_per_sequence
        return cls(
            tuple(_empty_pages(layout, pages, batch, scales) for scales in each),
            jnp.arange(pages, dtype=jnp.int32).reshape(batch, pages_per_sequence),
            jnp.zeros(batch, jnp.int32),
            KVFormat.of(layout.format),
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
        added = as_array("require_room: tokens", tokens)
        if added.shape not in ((), self.lengths.shape) or not jnp.issubdtype(
            added.dtype, jnp.integer
        ):
            raise ValueError(
                f"require_room: tokens is {shown(tokens)}: expected a whole number, or one for "
                f"each of the {len(self.lengths)} sequences"
            )
        if not is_known((self.lengths, added)):
            return
        needed = int(jnp.max(self.lengths + added.astype(jnp.int32)))
        if needed > self.capacity:
            raise ValueError(
                f"the KV cache holds {self.capacity} tokens per sequence, but {needed} are "
                f"needed; create it with max_tokens={needed} or ask for fewer tokens"
            )


def _empty_pages(layout: KVLayout, pages: int, batch: int, scales: jax.Array) -> KVPages:
    """One layer's; scales: [2, KV heads] or [2, KV heads, head dim]."""
    format, shape = KVFormat.of(layout.format), (pages, layout.kv_heads, layout.page_size)

    # Each buffer its own: a buffer that appears twice can't be donated.
    def stored(codes: KVCodes, scale: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        storage = jnp.uint16 if codes.is_quantized else layout.dtype
        groups = layout.page_size // (codes.group or layout.page_size)
        parameters = {
            "token": lambda: jnp.zeros(shape, jnp.uint32),
            "channel": lambda: jnp.zeros((*shape[:2], groups, layout.head_dim), jnp.uint32),
            "head": lambda: jnp.copy(scale),
            "static": lambda: jnp.copy(scale),
            None: lambda: None,
        }
        words = jnp.zeros((*shape, layout.head_dim // codes.planes), storage)
        return words, parameters[codes.scaling]()

    (keys, key_parameters), (values, value_parameters) = (
        stored(codes, scales[i]) for i, codes in enumerate(layout.codes)
    )
    residual = None
    if format.block is not None:
        block = (batch, layout.kv_heads, format.block, layout.head_dim)
        waiting = [jnp.zeros(block, layout.dtype) for _ in range(2)]
        residual = KVPages(waiting[0], waiting[1], None, None, KVFormat())
    return KVPages(
        *(keys, values, key_parameters, value_parameters),
        format,
        residual,
        layout.parameter_dtype,
    )


def _broadcast_scales(
    scales: jax.typing.ArrayLike | None, layers: int, layout: KVLayout
) -> jax.Array:
    """Given scales as float32; under `jit`, where values are unknown, any are taken."""
    format = KVFormat.of(layout.format)
    if scales is None and format.scaling == "static":
        raise ValueError(
            f"{format} needs scales of channels: measure them on keys and values (cache_scales), "
            "or of a whole model with mpjax.calibrate_cache"
        )
    if scales is not None and format.scaling is None:
        raise ValueError(
            f"there are scales, but {format} is given none: it stores keys and values as they are, "
            "or measures scales of its own; leave them out, or choose KV8s or KVfp8"
        )
    scales = as_array("PagedKVCache: scales", 1.0 if scales is None else scales)
    if is_known(scales):
        values = np.asarray(scales)
        if not ((values > 0) & np.isfinite(values)).all():
            raise ValueError("scales of keys and values must be positive and finite")
    is_static = format.scaling == "static"
    shape = (layers, 2, layout.kv_heads) + is_static * (layout.head_dim,)
    try:
        return jnp.broadcast_to(jnp.asarray(scales, jnp.float32), shape)
    except ValueError as error:
        raise ValueError(
            f"scales have shape {np.shape(scales)}: expected what broadcasts to {shape}, [layers, "
            f"2, KV heads{', head dim' if is_static else ''}]"
        ) from error
