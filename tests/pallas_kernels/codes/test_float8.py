from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mpjax.kernels import WeightFormat, codes
from tests.pallas_kernels.codes.decoding import bits_of
from tests.pallas_kernels.oracles import NUMPY_DTYPES

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
ALL_WORDS = np.arange(2**16, dtype=np.uint16).reshape(64, 1024)
SCALES = np.geomspace(1e-6, 10, 64).astype(np.float32)


@pytest.mark.parametrize("operand", ["bfloat16", "float16"])
def test_all_words_decode_to_their_bytes_values(decode, operand):
    planes = decode(
        ALL_WORDS,
        SCALES.view(np.uint32),
        format="float8:g128",
        operand=operand,
        scale_dtype="float32",
    )
    assert planes.dtype == NUMPY_DTYPES[operand]
    for plane, values in enumerate(planes):
        encoded = (ALL_WORDS >> (8 * plane) & 0xFF).astype(np.uint8)
        expected = encoded.view(E4M3).astype(np.float32)
        # e4m3 has one NaN of each sign; read by its bits, it would be 480.
        expected = np.where(encoded & 0x7F == 0x7F, 480 * (1 - (encoded >> 7) * 2.0), expected)
        expected = expected.astype(NUMPY_DTYPES[operand])
        np.testing.assert_array_equal(bits_of(values), bits_of(expected))


def test_words_are_the_operand_of_a_float8_product(decode):
    encoded = np.tile(np.arange(256, dtype=np.uint8), (16, 1))
    planes = decode(
        encoded.view(E4M3),
        SCALES[:16].view(np.uint32),
        format="float8:gK/float8",
        operand="float8_e4m3fn",
        scale_dtype="float32",
    )
    np.testing.assert_array_equal(bits_of(planes), encoded[None])


@pytest.mark.parametrize("operand", ["bfloat16", "float16", "float8_e4m3fn"])
def test_parameters_are_a_scale(operand):
    group = codes.of(WeightFormat.parse("float8:g128")).load(
        jnp.asarray(SCALES.view(np.uint32)), "float32", jnp.dtype(operand), 64
    )
    assert group.scale is not None
    np.testing.assert_array_equal(group.scale, SCALES[:, None])
    [carried] = group.arguments
    assert (carried.shape, carried.dtype.itemsize) == ((64, 1), 2)
