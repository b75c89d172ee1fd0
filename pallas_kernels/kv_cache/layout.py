"""The layout of one layer's pages: heads, format, page size and dtype."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.kernels.checks import as_dtype, whole_number
from mpjax.kernels.kv_cache import quantize
from mpjax.kernels.kv_cache.codes import KVCodes
from mpjax.kernels.kv_cache.formats import KVFormat

PAGE_SIZES = (16, 32, 64, 128, 256)


def read_page_size(page_size: Any, format: KVFormat) -> int:
    """The page size as an int. Raises ValueError for a size that the format does not support."""
    page_size = whole_number("page_size", page_size)
    if page_size not in PAGE_SIZES:
        raise ValueError(f"page size {page_size}: expected one of {PAGE_SIZES}")
    if page_size % (group := format.group or 1):
        raise ValueError(f"page size {page_size}: {format} needs a multiple of {group}")
    return page_size


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """The heads of a layer, and the pages with their keys and values.

    kv_heads, head_dim: the number of heads of keys and values, and of channels of each.
    value_dim: the number of channels of each value, if it differs; None for head_dim.
    format: a KVFormat, or a string that KVFormat.parse accepts, such as "K8V4".
    page_size: tokens in a page: 16, 32, 64, 128 or 256, and a multiple of the format's groups of
        tokens if it has groups (KV4c, KV2). It changes results only by rounding.
    dtype: the model's compute dtype, of its keys, values and queries. Unquantised keys, values and
        residuals are stored in it. Scales and zeros in pages are bfloat16 if it is bfloat16,
        else float16 (KVPages.parameter_dtype). Scales and zeros of key channels are float16: keys
        beyond ±65,504 are clamped, and keys below about 1e-3 lose more precision than others. Keys
        and queries of another dtype give correct results, too, but kernels require 16-bit queries
        to have the dtype of the scales.

    Raises ValueError for sizes that are not positive whole numbers or don't fit the format.
    """

    kv_heads: int
    head_dim: int
    format: KVFormat | str = "KV16"
    page_size: int = 128
    dtype: jax.typing.DTypeLike = jnp.bfloat16
    value_dim: int | None = None

    def __post_init__(self) -> None:
        format = KVFormat.of(self.format)
        for name, value in (
            ("format", format),
            ("dtype", as_dtype("KVLayout: dtype", self.dtype)),
            ("page_size", read_page_size(self.page_size, format)),
            ("kv_heads", whole_number("kv_heads", self.kv_heads)),
            ("head_dim", whole_number("head_dim", self.head_dim)),
            ("value_dim", self.value_dim and whole_number("value_dim", self.value_dim)),
        ):
            object.__setattr__(self, name, value)
        for codes, dim in zip(self.codes, self.dims, strict=True):
            if dim % codes.planes:
                raise ValueError(f"{format} needs a head dimension divisible by {codes.planes}")

    @property
    def dims(self) -> tuple[int, int]:
        """The number of channels of a key, and of a value."""
        return self.head_dim, self.value_dim or self.head_dim

    @property
    def codes(self) -> tuple[KVCodes, KVCodes]:
        """The kinds of codes of keys and of values."""
        format = KVFormat.of(self.format)
        return format.key_codes, format.value_codes

    @property
    def parameter_dtype(self) -> str | None:
        """The dtype of the scales and zeros in pages; None if pages keep none."""
        dtype = quantize.parameter_dtype(jnp.dtype(self.dtype))
        return dtype.name if KVFormat.of(self.format).keeps_scales else None
