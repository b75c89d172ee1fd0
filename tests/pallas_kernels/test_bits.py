from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import pallas as pl

from mpjax.kernels import bits
from mpjax.kernels.launch import Settings, launch, load, store
from tests.pallas_kernels.oracles import NUMPY_DTYPES

ALL_WORDS = np.arange(2**16, dtype=np.uint16)

each_width = pytest.mark.parametrize("width", [2, 4, 8])
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


@each_dtype
def test_pairs_in_float32(dtype, rng):
    half = NUMPY_DTYPES[dtype]
    finite = np.isfinite(ALL_WORDS.view(half).astype(np.float32))
    low, high = (ALL_WORDS[finite].view(half), rng.permutation(ALL_WORDS[finite]).view(half))
    found = bits.widen_pair(bits.pack_pair(jnp.asarray(low), jnp.asarray(high)), dtype)
    for wide, narrow in zip(found, (low, high), strict=True):
        assert wide.dtype == jnp.float32
        np.testing.assert_array_equal(
            np.asarray(wide).view(np.uint32), narrow.astype(np.float32).view(np.uint32)
        )


def zero_points(width: int) -> list[int]:
    return [0, 1, 2 ** (width - 1), 2**width - 1, 2**width]


@pytest.fixture(params=["twin", "interpreted_ptx"])
def ptx(request: pytest.FixtureRequest) -> bool:
    """Whether inline PTX runs, which numpy then interprets; tests run with it and with the twin."""
    if request.param == "interpreted_ptx":
        request.getfixturevalue("interpreted_ptx")
    return request.param == "interpreted_ptx"


@each_width
@each_dtype
def test_decoded_planes_are_exact(width, dtype, ptx):
    words = jnp.asarray(ALL_WORDS)
    for plane in range(16 // width):
        codes = ALL_WORDS // 2 ** (plane * width) % 2**width
        for zero in zero_points(width):
            decoded = bits.decode_plane(words, plane, width, jnp.asarray(zero, dtype))
            assert decoded.dtype == jnp.dtype(dtype)
            unit = 2.0 ** bits.plane_exponent(dtype)
            np.testing.assert_array_equal(
                np.asarray(decoded).astype(np.float32), (codes.astype(np.float32) - zero) * unit
            )


@each_width
@each_dtype
def test_zero_points_broadcast_over_a_tile(width, dtype, ptx):
    words = jnp.asarray(ALL_WORDS[:64].reshape(4, 16))
    zero = np.arange(4)[:, None]
    decoded = bits.decode_plane(words, 0, width, jnp.asarray(zero, dtype))
    expected = ALL_WORDS[:64].reshape(4, 16).astype(np.float32) % 2**width - zero
    expected *= 2.0 ** bits.plane_exponent(dtype)
    np.testing.assert_array_equal(np.asarray(decoded).astype(np.float32), expected)


@each_width
@each_dtype
def test_codes_in_place_are_exact(width, dtype, ptx):
    """With PTX they are subnormals, or lie in the binade above, which numpy reads as well."""
    middle = {2: 1.5, 4: 7.5, 8: 127.5}[width] if dtype == "float16" else 0
    assert bits.offset(width, dtype) == middle
    for plane, offset in itertools.product(range(16 // width), {0, middle}):
        codes = ALL_WORDS // 2 ** (plane * width) % 2**width
        words = jnp.asarray(ALL_WORDS)
        found = bits.decode_in_place(words, plane, width, dtype, offset=offset, copy=plane)
        assert found.dtype == jnp.dtype(dtype)
        exponent = bits.exponent_in_place(plane, width, dtype, offset=offset)
        assert (exponent < 0) == ptx
        expected = np.ldexp(codes.astype(np.float64) - offset, exponent)
        np.testing.assert_array_equal(np.asarray(found).astype(np.float64), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_copies_of_codes_are_alike_and_stay_apart(dtype, lower_for_cuda):
    """Triton would move a tile with two uses through shared memory."""

    def kernel(words_ref, out_ref):
        words = load(words_ref.at[jnp.arange(64)])
        for copy in range(2):
            codes = bits.decode_in_place(words, 1, 4, dtype, copy=copy)
            store(out_ref.at[copy, jnp.arange(64)], codes)

    def decode(words):
        return launch(
            kernel,
            words,
            out_shape=jax.ShapeDtypeStruct((2, 64), jnp.dtype(dtype)),
            grid=(1,),
            settings=Settings("copies"),
            interpret=False,
        )

    program = lower_for_cuda(decode, jax.ShapeDtypeStruct((64,), jnp.uint16))
    first, second = (program.count(f"copy {copy}") for copy in range(2))
    assert first == second == 1


@each_width
@each_dtype
def test_scaled_planes_are_rounded_once(width, dtype, ptx, rng):
    """All words beside a step and a zero of each row; the last row ends beyond float16."""
    words = ALL_WORDS.reshape(256, 256)
    half = NUMPY_DTYPES[dtype]
    step = rng.uniform(0.02, 0.5, (256, 1)).astype(half)
    zero = rng.uniform(-50, 50, (256, 1)).astype(half)
    step[-1], zero[-1] = 65504 / (2**width - 1) * 2.01, -65504
    for plane in range(16 // width):
        codes = words // 2 ** (plane * width) % 2**width
        exact = codes * step.astype(np.float32) + zero.astype(np.float32)
        expected = np.minimum(exact, float(jnp.finfo(dtype).max)).astype(half)
        unit = half.type(2.0 ** bits.exponent_scaled(dtype))
        found = bits.decode_scaled(
            jnp.asarray(words), plane, width, jnp.asarray(step), jnp.asarray(zero * unit)
        )
        assert found.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(np.asarray(found), expected * unit)


def factors(rng: np.random.Generator, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """All finite values of a dtype, each with a random scale that keeps it a normal number."""
    values = ALL_WORDS.view(NUMPY_DTYPES[dtype])
    with np.errstate(invalid="ignore"):
        magnitude = np.abs(values.astype(np.float32))
    info = jnp.finfo(dtype)
    is_normal = (magnitude >= 4 * float(info.tiny)) & (magnitude <= float(info.max) / 4)
    values = np.where(is_normal, values, np.copysign(np.zeros_like(values), values))
    scales = rng.uniform(0.25, 4, values.shape) * rng.choice([-1, 1], values.shape)
    return values, scales.astype(NUMPY_DTYPES[dtype])


def assert_products_round_once(products: jax.Array, values: np.ndarray, scales: np.ndarray) -> None:
    exact = values.astype(np.float32) * scales.astype(np.float32)  # 22 bits at most
    expected = exact.astype(values.dtype)
    assert products.dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(products).view(np.uint16), expected.view(np.uint16))


@each_dtype
def test_multiply_rounds_once(dtype, ptx, rng):
    values, scales = factors(rng, dtype)
    products = bits.multiply(jnp.asarray(values), jnp.asarray(scales))
    assert_products_round_once(products, values, scales)


@each_dtype
def test_multiply_rounds_the_scale_to_the_tiles_dtype_and_broadcasts_it(dtype, ptx, rng):
    tile = rng.standard_normal((4, 8)).astype(NUMPY_DTYPES[dtype])
    scale = rng.standard_normal((4, 1)).astype(np.float32)
    products = bits.multiply(jnp.asarray(tile), jnp.asarray(scale))
    rounded = np.broadcast_to(scale.astype(tile.dtype), tile.shape)
    assert_products_round_once(products, tile, rounded)


@each_dtype
def test_two_terms_of_a_product_are_exact(dtype, ptx, rng):
    values, scales = factors(rng, dtype)
    least = float(jnp.finfo(dtype).tiny) * 2.0**20  # what rounding takes away must be normal, too
    values = np.where(np.abs(values.astype(np.float32)) < least, np.zeros_like(values), values)
    terms = bits.multiply_exactly(jnp.asarray(values), jnp.asarray(scales))
    assert_products_round_once(terms[0], values, scales)
    assert terms[1].dtype == jnp.dtype(dtype)
    total = sum(np.asarray(term).astype(np.float64) for term in terms)
    np.testing.assert_array_equal(total, values.astype(np.float64) * scales.astype(np.float64))


def multiply_in_kernel(values: jax.Array, scales: jax.Array) -> jax.Array:
    """`multiply` with PTX over flat arrays, in a kernel of its own."""
    tile = 1024

    def kernel(values_ref, scales_ref, out_ref):
        place = pl.program_id(0) * tile + jnp.arange(tile)
        products = bits.multiply(load(values_ref.at[place]), load(scales_ref.at[place]))
        store(out_ref.at[place], products)

    return launch(
        kernel,
        values,
        scales,
        out_shape=jax.ShapeDtypeStruct(values.shape, values.dtype),
        grid=(values.size // tile,),
        settings=Settings("multiply", warps=4),
        interpret=False,
    )


@each_dtype
def test_ptx_multiplication_lowers(dtype, lower_for_cuda):
    suffix = "bf16x2" if dtype == "bfloat16" else "f16x2"
    values = jnp.zeros(2048, dtype)
    assert f"fma.rn.{suffix}" in lower_for_cuda(multiply_in_kernel, values, values)


@pytest.mark.gpu
@each_dtype
def test_ptx_multiplication_on_a_gpu_rounds_once(dtype, rng):
    values, scales = factors(rng, dtype)
    products = jax.jit(multiply_in_kernel)(jnp.asarray(values), jnp.asarray(scales))
    assert_products_round_once(products, values, scales)
