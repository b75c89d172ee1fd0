from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import KVFormat, KVLayout, PagedKVCache


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 48}, r"page size 48: expected one of \(16, 32, 64, 128, 256\)"),
        ({"head_dim": 66, "format": KVFormat(4)}, "KV4 needs a head dimension divisible by 4"),
        ({"format": "KV4c"}, "page size 64: KV4c needs a multiple of 128"),
        ({"format": "KV9"}, "KV9 is not a KV format"),
        ({"dtype": "int8"}, "KVLayout: dtype is 'int8': expected a dtype"),
        *(({name: 0}, f"{name} is 0: expected 1 or more") for name in ("kv_heads", "head_dim")),
    ],
)
def test_what_there_cannot_be_is_refused(change, message):
    fields = {"kv_heads": 2, "head_dim": 64, "page_size": 64} | change
    with pytest.raises(ValueError, match=message):
        KVLayout(**fields)


def test_fields_have_one_type_each():
    """So that equal layouts are equal, and can be keys."""
    one = KVLayout(2, 64, "K8V4", 64, "bf16")
    other = KVLayout(np.int64(2), 64, KVFormat(8, 4), np.int32(64), jnp.bfloat16)
    assert one == other
    assert hash(one) == hash(other)
    assert isinstance(one.format, KVFormat)


@pytest.mark.parametrize(
    ("format", "dtype", "expected"),
    [("KV8", "bfloat16", "bfloat16"), ("KV4", "float32", "float16"), ("KV16", "float16", None)],
)
def test_scales_that_are_kept_have_a_dtype(format, dtype, expected):
    assert KVLayout(2, 64, format, dtype=dtype).parameter_dtype == expected


def test_codes_are_those_of_keys_and_values():
    keys, values = KVLayout(2, 64, "K8V4").codes
    assert (keys.bits, values.bits) == (8, 4)


def test_a_cache_needs_a_layout():
    with pytest.raises(ValueError, match="PagedKVCache: layout is 'KV8': expected a KVLayout"):
        PagedKVCache.create("KV8", layers=1, batch=1, max_tokens=1)  # type: ignore[arg-type]
