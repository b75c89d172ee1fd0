"""Products that write the weight out, XLA's, and the reference."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import QuantizedTensor, matmul
from mpjax.kernels.gemm import dequantize, reference, xla
from tests.pallas_kernels.gemm.weights import (
    ALL_FORMATS,
    INTEGER_FORMATS,
    dense,
    exact,
    integer_activations,
    integer_weight,
    random_activations,
    random_weight,
    weight_struct,
)
from tests.pallas_kernels.oracles import GATES, NUMPY_DTYPES, relative_error
from tests.sweeps import in_sweep

OPERATION = ("table4:g256", "table3:g32", "table2:g64")
# One of each kind of codes and of parameters.
SOME = (
    *("uint4:g32", "uint4:g128:sym", "uint8:gK", "affine4:g32", "affine8:g64", *OPERATION),
    *("float8:g128", "float8:gK/float8", "float4:g32", "int4:g128/int8", "liquid4:g64/int8"),
)
each_format = pytest.mark.parametrize("text", ALL_FORMATS)
# K of whole groups that is not of whole blocks, where groups are smaller than a block.
CHANNELS = {"g32": 96, "g64": 192, "g128": 384, "g256": 768, "gK": 300}


def channels_of(text: str) -> int:
    return CHANNELS[text.split(":")[1].split("/")[0]]


def as_written(weight: QuantizedTensor, dtype: str) -> np.ndarray:
    """The exact matrix [N, K], its table in `dtype` as in a kernel; rounded to float32, then again.

    Only FP8 values times a scale have more bits than a float32.
    """
    return dense(weight, dtype).T.astype(np.float32).astype(NUMPY_DTYPES[dtype])


@functools.partial(jax.jit, static_argnames="dtype")
def written(weight: QuantizedTensor, dtype: str) -> jax.Array:
    return dequantize.write_out(weight, jnp.dtype(dtype), interpret=True)


@pytest.mark.parametrize(
    ("outputs", "kernel"), [(128, "matmul_warpgroups_int8"), (100, "matmul_int8")]
)
def test_two_levels_are_multiplied_as_int8_is(outputs, kernel, pretend_gpu):
    weight = weight_struct("liquid4:g64/int8", 256, outputs)
    x = jax.ShapeDtypeStruct((2000, 256), jnp.bfloat16)
    multiply = functools.partial(matmul, implementation="dequantize")
    names = re.findall(r"\b(?:matmul|dequantize)_\w+\d\b", str(jax.make_jaxpr(multiply)(x, weight)))
    assert list(dict.fromkeys(names)) == ["dequantize_liquid4", kernel]


# Decoding tables is slow without a GPU, and groups are the same for all codes.
@pytest.mark.parametrize(
    ("text", "channels"),
    [
        *(
            (t, channels_of(t)) if t in SOME else in_sweep(t, channels_of(t))
            for t in ALL_FORMATS
            if t in OPERATION or "table" not in t
        ),
        *(("float8:g128", 200), ("float8:g128/float8", 200)),
    ],
)
def test_write_out_is_exact(text, channels, rng):
    outputs = int(rng.choice([7, 65, 130]))
    weight = random_weight(rng, text, channels, outputs)
    dtype = "float16" if text in ALL_FORMATS[::2] else "bfloat16"
    matrix = np.asarray(written(weight, dtype))
    assert matrix.shape == (outputs, weight.padded_channels)
    np.testing.assert_array_equal(matrix[:, :channels], as_written(weight, dtype))
    # The padding of K meets zeros of x, so that it must be a number.
    assert np.isfinite(matrix.astype(np.float32)).all()


@functools.partial(jax.jit, static_argnames="dtype")
def multiplied(x: jax.Array, weight: QuantizedTensor, dtype: str) -> jax.Array:
    return dequantize.matmul(x, weight, jnp.dtype(dtype))


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("uint4:g32", "bfloat16"),
        ("uint8:gK", "float16"),
        ("table2:g128", "bfloat16"),
        ("float8:g128", "float16"),
        ("float8:g128/float8", "bfloat16"),
        ("float8:gK/float8", "float16"),
        ("int8:gK/int8", "bfloat16"),
        ("liquid4:g64/int8", "float16"),
    ],
)
def test_against_float64(text, dtype, rng, interpreted_triton):
    weight = random_weight(rng, text, channels_of(text), 70)
    x = random_activations(rng, weight, 5, dtype)
    product = multiplied(x, weight, dtype)
    assert product.dtype == dtype
    assert relative_error(product, exact(x) @ dense(weight)) < GATES[dtype]


@pytest.mark.parametrize("text", [text if text in SOME else in_sweep(text) for text in ALL_FORMATS])
def test_lowers(text, lower_for_cuda):
    write = functools.partial(dequantize.write_out, dtype=jnp.dtype(jnp.bfloat16))
    weight = weight_struct(text, 4096, 1000)
    is_fused = f'name = "dequantize_{weight.format.codes}"' in lower_for_cuda(write, weight)
    assert is_fused == (not weight.format.is_flat), "a plain matrix is left to XLA"


@pytest.mark.gpu
@each_format
def test_write_out_is_exact_on_the_gpu(text, rng):
    weight = random_weight(rng, text, 3 * channels_of(text), 1000)
    for dtype in NUMPY_DTYPES:
        write = jax.jit(functools.partial(dequantize.write_out, dtype=jnp.dtype(dtype)))
        matrix = np.asarray(write(weight))[:, : weight.shape[0]]
        np.testing.assert_array_equal(matrix, as_written(weight, dtype))


def assert_two_levels_are_the_same_to_the_bit(rng, rows: int, channels: int, outputs: int):
    weight = random_weight(rng, "liquid4:g64/int8", channels, outputs)
    x = random_activations(rng, weight, rows, "bfloat16")
    products = [
        jax.jit(functools.partial(matmul, implementation=name))(x, weight)
        for name in ("dequantize", "triton")
    ]
    np.testing.assert_array_equal(*map(np.asarray, products))


@pytest.mark.one_of(2)
@pytest.mark.parametrize("shape", [(5, 192, 33), (40, 320, 70)])  # K that is no whole blocks
def test_two_levels_are_the_same_to_the_bit(shape, rng, interpreted_triton):
    assert_two_levels_are_the_same_to_the_bit(rng, *shape)


@pytest.mark.gpu
def test_two_levels_are_the_same_to_the_bit_on_the_gpu(rng):
    assert_two_levels_are_the_same_to_the_bit(rng, 300, 1088, 1000)


@pytest.mark.gpu
@pytest.mark.parametrize("text", ["uint4:g128", *INTEGER_FORMATS])
def test_products_on_the_gpu(text, rng):
    weight = random_weight(rng, text, 1152, 1000)
    x = random_activations(rng, weight, 300, "bfloat16")
    multiply = jax.jit(functools.partial(dequantize.matmul, out_dtype=jnp.dtype("bfloat16")))
    assert relative_error(multiply(x, weight), exact(x) @ dense(weight)) < GATES["bfloat16"]


FORMATS = ("int8:gK/int8", "float8:gK/float8")
multiply = jax.jit(xla.matmul, static_argnums=2)


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize(
    ("rows", "channels", "dtype"), [(1, 300, "bfloat16"), (17, 128, "float16"), (3, 1, "bfloat16")]
)
def test_xlas_product_against_float64(text, rows, channels, dtype, rng):
    weight = random_weight(rng, text, channels, 33)
    x = random_activations(rng, weight, rows, dtype)
    product = multiply(x, weight, jnp.dtype(dtype))
    assert product.dtype == dtype
    assert relative_error(product, exact(x) @ dense(weight)) < GATES[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("rows", [1, 17, 300])
def test_on_the_gpu(text, rows, rng):
    weight = integer_weight(rng, text, 1700, 1000)
    x = integer_activations(rng, weight, rows, "bfloat16")
    product = multiply(x, weight, jnp.dtype(jnp.float32))
    np.testing.assert_array_equal(np.asarray(product), exact(x) @ dense(weight))


def test_fp8_sums_that_leave_the_product_in_bfloat16(rng):
    weight = random_weight(rng, "float8:gK/float8", 128, 1030)  # more than a tile, and a piece
    x = random_activations(rng, weight, 3, "bfloat16")
    product = xla.scaled_dot(
        x, weight.words[0], weight.scales()[0], jnp.dtype(jnp.bfloat16), interpret=True
    )
    assert product.dtype == jnp.bfloat16
    assert relative_error(product, exact(x) @ dense(weight)) < GATES["bfloat16"]


CUT = ("float8:g128", "float8:g128/float8")  # formats whose last group may be
by_reference = jax.jit(reference.matmul, static_argnums=2)


# The first format of each kind of codes and of activations.
ONE_OF_EACH = tuple({re.sub(r":\w+", "", text): text for text in reversed(ALL_FORMATS)}.values())


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("text", "channels"),
    [
        *((text, 256) if text in ONE_OF_EACH else in_sweep(text, 256) for text in ALL_FORMATS),
        *((text, channels) for text in CUT for channels in (100, 200)),
    ],
)
def test_is_the_product_with_the_dequantized_weight(text, channels, rng):
    weight = random_weight(rng, text, channels, 8)
    x = random_activations(rng, weight, 4, "bfloat16")
    product = by_reference(x, weight, jnp.dtype(jnp.float32))
    assert relative_error(product, exact(x) @ dense(weight)) < 1e-6
