"""The KV cache as a pytree: pages, block tables and lengths."""

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
    """The keys or the values of one layer's pages; in a kernel, references to them."""

    words: Any  # `keys` or `values` of KVPages
    parameters: Any  # `key_parameters` or `value_parameters` of KVPages
    codes: KVCodes
    parameter_dtype: Any  # of the scales and zeros in the parameters; None if there are none


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "values", "key_parameters", "value_parameters", "residual"],
    meta_fields=["format", "parameter_dtype"],
)
@dataclasses.dataclass(frozen=True)
class KVPages:
    """The pages of one layer.

    Slots of a page after its sequence's length must have finite values, since attention multiplies
    them by weight zero: clear a page with NaN or infinity before another sequence gets it.

    keys, values: for 16-bit kinds, [pages, KV heads, page size, head dim] in the compute dtype. For
        other kinds, uint16 words [pages, KV heads, page size, head dim / planes]: code j of word w
        is head channel j · head dim / planes + w. If `KVCodes.hadamard` is set, keys are stored
        after the Hadamard transform of their channels.
    key_parameters, value_parameters: if pages keep scales, uint32 pairs, the 16-bit scale below the
        16-bit zero: of tokens [pages, KV heads, page size], or of channels [pages, KV heads, groups
        of tokens, head dim]. If scales are static, float32: for FP8 [KV heads], for 8s [KV heads,
        head dim]. Otherwise None.
    residual: for formats with blocks, 16-bit pages of the size of a block; else None. Page b is for
        row b of the batch: it has the tokens of the last block that sequence b has begun, at their
        positions in the block. When the first token after a block is appended, the block is encoded
        into the other pages. Row b must stay the same sequence, whose length must not shrink,
        except to 0.
    parameter_dtype: "bfloat16" or "float16", the dtype of the scales and zeros of tokens and of
        value channels, whatever the dtype of appended keys and values and of queries; None if pages
        keep no scales. The kernel requires queries of this dtype. Scales and zeros of key channels
        are always float16.
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
        """The keys and the values, each with its parameters and its kind of codes."""
        kinds = self.format.key_codes, self.format.value_codes
        # Attention multiplies queries by steps of key channels in float16 (attention/queries.py).
        key_dtype = "float16" if kinds[0].scaling == "channel" else self.parameter_dtype
        return (
            Side(self.keys, self.key_parameters, kinds[0], key_dtype),
            Side(self.values, self.value_parameters, kinds[1], self.parameter_dtype),
        )

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.keys.shape[2]

    @property
    def head_dim(self) -> int:
        """The number of channels of a head's keys, and of its values unless `value_dim` differs."""
        return self.keys.shape[3] * self.format.key_codes.planes

    @property
    def value_dim(self) -> int:
        """The number of channels of a head's values."""
        return self.values.shape[3] * self.format.value_codes.planes


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["layers", "block_tables", "lengths"],
    meta_fields=["format"],
)
@dataclasses.dataclass(frozen=True)
class PagedKVCache:
    """The keys and values of a batch of sequences, in pages that block tables assign.

    layers: one KVPages for each decoder layer.
    block_tables: int32 [batch, pages per sequence]; entry p of a sequence is the page of its tokens
        from position p · page_size on, the same in every layer.
    lengths: int32 [batch], the number of cached tokens of each sequence.
    format: of the keys and values (static).

    A cache is a value: functions take one and return the next. Donate it to `jit`, so that the next
    cache reuses its buffers.
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
        """An empty cache with room for `max_tokens` tokens in each of `batch` sequences.

        The capacity is rounded up to whole pages.

        layout: the heads of every layer, and the format and size of its pages.
        scales: positive, for formats with static scales; keys' scales come first. For FP8 (a
            checkpoint's k_scale and v_scale) they broadcast to [layers, 2, KV heads]; the default,
            1, represents magnitudes up to 448. For 8s they broadcast to [layers, 2, KV heads, head
            dim] (`cache_scales`), and there is no default.

        Raises ValueError for sizes that are not positive whole numbers, and for scales that the
        format does not take.
        """
        require_type("PagedKVCache: layout", layout, KVLayout)
        batch, max_tokens = whole_number("batch", batch), whole_number("max_tokens", max_tokens)
        pages_per_sequence = -(-max_tokens // layout.page_size)
        pages = batch * pages_per_sequence
        return cls(
            create_pages(layout, layers=layers, pages=pages, sequences=batch, scales=scales),
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
        """The most tokens that each sequence can have."""
        return self.block_tables.shape[1] * self.page_size

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays, in device memory."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def require_room(self, tokens: int | jax.Array) -> None:
        """Raises ValueError unless each sequence has room for `tokens` more; see `require_room`."""
        require_room(self.lengths, self.capacity, tokens)


def require_room(lengths: jax.Array, capacity: int, tokens: int | jax.Array) -> None:
    """Raises ValueError unless sequences have room for `tokens` more tokens.

    lengths: int32 [batch], the current lengths. capacity: the most tokens of a sequence. tokens: a
    whole number for all sequences, or one for each.

    Copies lengths back from the device. Under `jit`, where lengths are unknown, it never raises.
    """
    added = as_array("require_room: tokens", tokens)
    if added.shape not in ((), lengths.shape) or not jnp.issubdtype(added.dtype, jnp.integer):
        raise ValueError(
            f"require_room: tokens is {shown(tokens)}: expected a whole number, or one for "
            f"each of the {len(lengths)} sequences"
        )
    if not is_known((lengths, added)):
        return
    needed = int(jnp.max(lengths + added.astype(jnp.int32)))
    if needed > capacity:
        raise ValueError(
            f"the KV cache holds {capacity} tokens per sequence, but {needed} are "
            f"needed; create it with max_tokens={needed} or ask for fewer tokens"
        )


def create_pages(
    layout: KVLayout,
    *,
    layers: int,
    pages: int,
    sequences: int,
    scales: jax.typing.ArrayLike | None = None,
) -> tuple[KVPages, ...]:
    """Empty pages for each of `layers` layers, not yet assigned to sequences.

    pages: their number in a layer. sequences: the number of residuals, for formats with blocks.
    scales: as for PagedKVCache.create, with its errors.
    """
    layers, pages = whole_number("layers", layers), whole_number("pages", pages)
    sequences = whole_number("sequences", sequences)
    each = _broadcast_scales(scales, layers, layout)
    return tuple(_empty_pages(layout, pages, sequences, scales) for scales in each)


def _empty_pages(
    layout: KVLayout, pages: int, batch: int, scales: jax.Array | np.ndarray
) -> KVPages:
    """The empty pages of one layer.

    pages: their number. batch: the number of sequences, for the residual.
    scales: float32 [2, KV heads] or [2, KV heads, head dim], keys' scales first.
    """
    format, shape = KVFormat.of(layout.format), (pages, layout.kv_heads, layout.page_size)

    # Every array is a separate buffer: a buffer that appears twice can't be donated.
    def stored(
        codes: KVCodes, dim: int, scale: jax.Array | np.ndarray
    ) -> tuple[jax.Array, jax.Array | None]:
        storage = jnp.uint16 if codes.is_quantized else layout.dtype
        groups = layout.page_size // (codes.group or layout.page_size)
        parameters = {
            "token": lambda: jnp.zeros(shape, jnp.uint32),
            "channel": lambda: jnp.zeros((*shape[:2], groups, dim), jnp.uint32),
            "head": lambda: jnp.array(scale),
            "static": lambda: jnp.array(scale),
            None: lambda: None,
        }
        words = jnp.zeros((*shape, dim // codes.planes), storage)
        return words, parameters[codes.scaling]()

    (keys, key_parameters), (values, value_parameters) = (
        stored(codes, layout.dims[i], scales[i]) for i, codes in enumerate(layout.codes)
    )
    residual = None
    if format.block is not None:
        block = (batch, layout.kv_heads, format.block)
        keys_of_block, values_of_block = (
            jnp.zeros((*block, dim), layout.dtype) for dim in layout.dims
        )
        residual = KVPages(keys_of_block, values_of_block, None, None, KVFormat())
    return KVPages(
        *(keys, values, key_parameters, value_parameters),
        format,
        residual,
        layout.parameter_dtype,
    )


def _broadcast_scales(
    scales: jax.typing.ArrayLike | None, layers: int, layout: KVLayout
) -> jax.Array | np.ndarray:
    """The scales of `PagedKVCache.create` as float32, broadcast to their full shape.

    Returns [layers, 2, KV heads], or [layers, 2, KV heads, head dim] for 8s: a NumPy array if
    scales are known, so that slicing needs no compilation. Raises ValueError for scales that the
    format does not take, that are not positive (unless unknown, under `jit`), or that don't
    broadcast.
    """
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
    numbers = np if is_known(scales) else jnp
    if is_known(scales):
        scales = np.asarray(scales)
        if not ((scales > 0) & np.isfinite(scales)).all():
            raise ValueError("scales of keys and values must be positive and finite")
    is_static = format.scaling == "static"
    shape = (layers, 2, layout.kv_heads) + is_static * (layout.head_dim,)
    try:
        return numbers.broadcast_to(numbers.asarray(scales, np.float32), shape)
    except ValueError as error:
        raise ValueError(
            f"scales have shape {np.shape(scales)}: expected what broadcasts to {shape}, [layers, "
            f"2, KV heads{', head dim' if is_static else ''}]"
        ) from error
