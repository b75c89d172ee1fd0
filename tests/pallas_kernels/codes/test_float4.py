from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mpjax.kernels import PlainCodes, WeightFormat, codes, pack, quantize
from tests.pallas_kernels.codes.decoding import bits_of
from tests.pallas_kernels.oracles import E2M1, NUMPY_DTYPES

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
WORDS = np.arange(2**16, dtype=np.uint16).reshape(2048, 32)
KIND = codes.of(WeightFormat("float4", 32))


@pytest.mark.parametrize("operand", ["bfloat16", "float16"])
def test_all_words_decode_to_their_codes_values(decode, operand):
    parameters = np.ones(2048, BFLOAT16).view(np.uint16).astype(np.uint32)
    planes = decode(WORDS, parameters, format="float4:g32", operand=operand, scale_dtype="bfloat16")
    for plane, values in enumerate(planes):
        expected = E2M1[WORDS >> (4 * plane) & 15].astype(NUMPY_DTYPES[operand])
        np.testing.assert_array_equal(bits_of(values), bits_of(expected))


def test_all_codes_with_all_scales():
    """Every power of two of e8m0, exact but for float32's subnormals, zeros to XLA on a CPU."""
    scales = np.ldexp(1.0, np.arange(-127, 128))  # [255]
    matrix = np.tile(np.arange(16, dtype=np.uint8).repeat(2)[:, None], (1, len(scales)))
    plain = PlainCodes(
        "float4:g32", jnp.asarray(matrix), jnp.asarray(scales.astype(BFLOAT16)[None])
    )
    with np.errstate(over="ignore"):  # 4 · 2**127 and more are infinite in float32
        expected = (E2M1[matrix] * scales).astype(np.float32)
    smallest = np.abs(expected) < np.finfo(np.float32).tiny
    for found in (plain.dequantize(), pack(plain).dequantize()):
        array = np.asarray(found)
        np.testing.assert_array_equal(array[~smallest], expected[~smallest])
        assert (np.abs(array[smallest]) < np.finfo(np.float32).tiny).all()


def test_values_round_to_the_nearest_and_ties_to_even():
    grid = np.linspace(-7, 7, 1121, dtype=np.float32)
    found = KIND.nearest(
        jnp.asarray(grid),
        KIND.fit(jnp.asarray(grid)[None, :, None], None)._replace(
            scales=jnp.ones((), jnp.bfloat16)
        ),
    )
    expected = np.clip(grid, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(np.abs(E2M1[np.asarray(found)]), np.abs(expected))
    np.testing.assert_array_equal(np.sign(E2M1[np.asarray(found)]), np.sign(expected))


def test_scales_are_powers_of_two(rng):
    weight = rng.standard_normal((64, 5)).astype(np.float32) * 2.0 ** rng.integers(-20, 20, 5)
    packed = quantize(jnp.asarray(weight), "float4:g32")
    scales = np.asarray(packed.scales()).astype(np.float64)[:2]
    peak = np.abs(weight.reshape(2, 32, 5)).max(1)
    np.testing.assert_array_equal(scales, 2.0 ** (np.floor(np.log2(peak)) - 2))
    zeros = quantize(jnp.zeros((32, 2)), "float4:g32")
    np.testing.assert_array_equal(zeros.scales()[:1], np.ones((1, 2)))
    error = np.abs(np.asarray(packed.dequantize()) - weight) / np.abs(weight).mean()
    assert error.mean() < 0.2


def test_parameters_are_a_scale():
    scales = 2.0 ** np.arange(-8, 8).astype(np.float32)
    words = scales.astype(BFLOAT16).view(np.uint16).astype(np.uint32)
    group = KIND.load(jnp.asarray(words), "bfloat16", jnp.dtype("bfloat16"), 32)
    assert group.scale is not None
    np.testing.assert_array_equal(group.scale, scales[:, None])
    assert jax.tree.leaves(group.arguments)[0].shape == (16, 1)
