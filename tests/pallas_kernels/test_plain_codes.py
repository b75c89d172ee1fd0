from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mpjax.kernels import PlainCodes, WeightFormat, pack
from tests.pallas_kernels.oracles import PACKED_FORMATS, PlainWeight

FORMATS = [text for text in PACKED_FORMATS if ":g32" not in text and ":g64:" not in text]


@pytest.mark.parametrize("text", FORMATS)
def test_dequantize_equals_the_description_of_the_format(text, rng):
    plain = PlainWeight.random(rng, WeightFormat.parse(text), 256, 4)
    order = rng.permutation(256)
    found = jax.jit(lambda plain: plain.dequantize())(plain.plain(order))
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(found, np.float64)[order], plain.values())


@pytest.mark.parametrize("scale_dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_scales_of_checkpoints_may_be_wider_than_packed_ones(scale_dtype):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (64, 4), dtype=np.uint8)
    zeros = rng.integers(0, 257, (2, 4), dtype=np.uint16)
    scales = rng.uniform(0.1, 1, (2, 4)).astype(scale_dtype)
    permutation = rng.permutation(64).astype(np.int32)
    arrays = (jnp.asarray(array) for array in (codes, scales, zeros, permutation))
    plain = PlainCodes("uint8:g32", *arrays)
    expected = np.empty((64, 4), np.float32)
    for row, channel in enumerate(permutation):
        difference = codes[row].astype(np.float32) - zeros[row // 32].astype(np.float32)
        expected[channel] = difference * scales[row // 32].astype(np.float32)
    np.testing.assert_array_equal(plain.dequantize(), expected)
    rounded = plain.dequantize("bf16")
    np.testing.assert_array_equal(rounded, expected.astype(ml_dtypes.bfloat16))


def test_plain_codes_are_a_pytree_with_a_static_format():
    arrays = jnp.zeros((8, 4), jnp.uint8), jnp.ones((1, 4)), jnp.zeros((1, 4), jnp.uint16)
    plain = PlainCodes("uint4", *arrays)
    assert len(jax.tree.leaves(plain)) == 3
    out = jax.jit(lambda value: value)(plain)
    assert (out.format, out.permutation, out.shape) == (WeightFormat("uint4"), None, (8, 4))


def test_the_format_may_be_text(rng):
    codes = jnp.asarray(rng.integers(0, 16, (64, 4)), jnp.uint8)
    scales, zeros = jnp.ones((2, 4), jnp.float16), jnp.full((2, 4), 8, jnp.uint8)
    found, expected = (
        pack(PlainCodes(f, codes, scales, zeros)) for f in ("uint4:g32", WeightFormat("uint4", 32))
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)
