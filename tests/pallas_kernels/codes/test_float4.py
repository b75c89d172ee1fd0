from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mpjax.kernels import PlainCodes, WeightFormat, codes, pack, quantize, replace_scales
from tests.pallas_kernels.codes.decoding import bits_of
from tests.pallas_kernels.oracles import E2M1, NUMPY_DTYPES

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
WORDS = np.arange(2**16, dtype=np.uint16).reshape(2048, 32)
KIND = codes.of(WeightFormat("float4", 32))


@pytest.mark.parametrize("operand", ["bfloat16", "float16"])
def test_all_words_decode_to_their_codes_values(decode, operand):
    parameters = np.full(2048, 127, np.uint32)
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


def test_a_word_has_the_exponents_of_four_groups():
    """All 256 bytes of e8m0, in each place of a word; 255 is NaN, and infinite in a kernel."""
    exponents = np.stack([np.roll(np.arange(256), i) for i in range(4)]).astype(np.uint8)
    words = np.ascontiguousarray(exponents.T).view("<u4").reshape(1, 256)
    expected = np.ldexp(1.0, exponents.astype(int) - 127)
    expected[exponents == 255] = np.nan
    scales, _ = KIND.unpack_parameters(jnp.asarray(words), "bfloat16")
    np.testing.assert_array_equal(np.asarray(scales, np.float64), expected)
    zeros = jnp.zeros(scales.shape, jnp.uint16)
    np.testing.assert_array_equal(KIND.pack_parameters(scales, zeros), words)
    expected[exponents == 255] = np.inf
    parts = KIND.split_parameters(jnp.asarray(words[0]))
    for part, wanted in zip(parts, expected, strict=True):
        group = KIND.load(part, "bfloat16", jnp.dtype("bfloat16"), 32)
        np.testing.assert_array_equal(np.asarray(group.scale)[:, 0], wanted)
        assert jax.tree.leaves(group.arguments)[0].shape == (256, 1)


@pytest.mark.parametrize("value", [3.0, -1.0, np.inf])
def test_only_powers_of_two_are_packed(value):
    scales = jnp.full((2, 3), value, jnp.bfloat16).at[0].set(2.0**-127)
    plain = PlainCodes("float4:g32", jnp.zeros((64, 3), jnp.uint8), scales)
    with pytest.raises(ValueError, match=f"scales of float4 are {value:.4g}, among others: expec"):
        pack(plain)


def test_exponents_are_not_replaced():
    packed = quantize(jnp.ones((64, 3)), "float4:g32")
    for use in (replace_scales, lambda packed, scales: packed.dequantize(scales=scales)):
        with pytest.raises(ValueError, match="float4:g32 has exponents for scales, which other"):
            use(packed, jnp.ones((2, 3)))
