from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import pallas as pl

from pallas_kernels import backend, bits
from tests.pallas_kernels.oracles import NUMPY_DTYPES

ALL_WORDS = np.arange(2**16, dtype=np.uint16)

each_width = pytest.mark.parametrize("width", [4, 8])
each_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


@each_width
def test_all_words_unpack_to_their_planes_and_pack_again(width):
    codes = np.asarray(bits.unpack_planes(jnp.asarray(ALL_WORDS), width))
    assert codes.dtype == np.uint8
    assert codes.shape == (16 // width, 2**16)
    for plane in range(16 // width):
        np.testing.assert_array_equal(codes[plane], ALL_WORDS // 2 ** (plane * width) % 2**width)
    np.testing.assert_array_equal(bits.pack_planes(jnp.asarray(codes), width), ALL_WORDS)


def test_leading_axes_are_kept(rng):
    codes = rng.integers(0, 16, (3, 2, 4, 5), dtype=np.uint8)
    words = np.asarray(bits.pack_planes(jnp.asarray(codes), 4))
    assert words.shape == (3, 2, 5)
    for place in np.ndindex(words.shape):
        digits = codes[(*place[:2], slice(None), place[2])]
        assert words[place] == sum(int(digit) * 16**j for j, digit in enumerate(digits))
    np.testing.assert_array_equal(bits.unpack_planes(jnp.asarray(words), 4), codes)


def test_the_number_of_planes_must_fit():
    with pytest.raises(ValueError, match="2 planes; 4-bit words hold 4"):
        bits.pack_planes(jnp.zeros((2, 8), jnp.uint8), 4)


@pytest.mark.parametrize("low", ["bfloat16", "float16"])
@pytest.mark.parametrize("high", ["uint16", "bfloat16", "float16"])
def test_pairs_keep_every_bit(low, high, rng):
    lows, highs = ALL_WORDS, rng.permutation(ALL_WORDS)
    reinterpret = jax.lax.bitcast_convert_type
    pair = bits.pack_pair(
        reinterpret(jnp.asarray(lows), jnp.dtype(low)),
        reinterpret(jnp.asarray(highs), jnp.dtype(high)),
    )
    assert pair.dtype == jnp.uint32
    np.testing.assert_array_equal(pair, lows.astype(np.int64) + highs.astype(np.int64) * 2**16)
    first, second = bits.unpack_pair(pair, low, high)
    assert (first.dtype, second.dtype) == (jnp.dtype(low), jnp.dtype(high))
    np.testing.assert_array_equal(reinterpret(first, jnp.uint16), lows)
    np.testing.assert_array_equal(reinterpret(second, jnp.uint16), highs)


@given(low=st.floats(width=16, allow_nan=False), zero=st.integers(0, 256))
def test_a_pair_is_a_scale_below_a_zero_point(low, zero):
    pair = bits.pack_pair(jnp.full(1, low, jnp.float16), jnp.full(1, zero, jnp.uint16))
    assert int(pair[0]) == zero << 16 | int(np.float16(low).view(np.uint16))


def zero_points(width: int) -> list[int]:
    return [0, 1, 2 ** (width - 1), 2**width - 1, 2**width]


@each_width
@each_dtype
def test_decoded_planes_are_exact(width, dtype):
    words = jnp.asarray(ALL_WORDS)
    for plane in range(16 // width):
        codes = ALL_WORDS // 2 ** (plane * width) % 2**width
        for zero in zero_points(width):
            decoded = bits.decode_plane(words, plane, width, jnp.asarray(zero, dtype), ptx=False)
            assert decoded.dtype == jnp.dtype(dtype)
            np.testing.assert_array_equal(
                np.asarray(decoded).astype(np.int64), codes.astype(np.int64) - zero
            )


@each_width
@each_dtype
def test_zero_points_broadcast_over_a_tile(width, dtype):
    words = jnp.asarray(ALL_WORDS[:64].reshape(4, 16))
    zero = np.arange(4)[:, None]
    decoded = bits.decode_plane(words, 0, width, jnp.asarray(zero, dtype), ptx=False)
    expected = ALL_WORDS[:64].reshape(4, 16).astype(np.int64) % 2**width - zero
    np.testing.assert_array_equal(np.asarray(decoded).astype(np.int64), expected)


def decode_in_kernel(words: jax.Array, zeros: jax.Array, plane: int, width: int) -> jax.Array:
    """decode_plane with PTX over flat arrays, in a kernel of its own."""
    tile = 1024

    def kernel(words_ref, zeros_ref, out_ref):
        place = pl.program_id(0) * tile + jnp.arange(tile)
        decoded = bits.decode_plane(
            backend.load(words_ref.at[place]),
            plane,
            width,
            backend.load(zeros_ref.at[place]),
            ptx=True,
        )
        backend.store(out_ref.at[place], decoded)

    return backend.pallas_call(
        kernel,
        words,
        zeros,
        out_shape=jax.ShapeDtypeStruct(words.shape, zeros.dtype),
        grid=(words.size // tile,),
        name="decode_plane",
        warps=4,
        stages=1,
        interpret=False,
    )


@each_width
@each_dtype
def test_ptx_decoding_lowers(width, dtype, lower_for_cuda):
    words, zeros = jnp.zeros(2048, jnp.uint16), jnp.zeros(2048, dtype)
    for plane in range(16 // width):
        function = functools.partial(decode_in_kernel, plane=plane, width=width)
        assert "lop3.b32" in lower_for_cuda(function, words, zeros)


@pytest.mark.gpu
@each_width
@each_dtype
def test_ptx_decoding_is_exact_for_all_words(width, dtype):
    points = np.array(zero_points(width))
    words = jnp.asarray(np.tile(ALL_WORDS, len(points)))
    zeros = np.repeat(points, 2**16)
    for plane in range(16 // width):
        decoded = jax.jit(functools.partial(decode_in_kernel, plane=plane, width=width))(
            words, jnp.asarray(zeros.astype(NUMPY_DTYPES[dtype]))
        )
        codes = np.tile(ALL_WORDS // 2 ** (plane * width) % 2**width, len(points))
        np.testing.assert_array_equal(
            np.asarray(decoded).astype(np.int64), codes.astype(np.int64) - zeros
        )
