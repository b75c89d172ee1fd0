from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import QuantizedTensor, matmul
from pallas_kernels.gemm import reference, shapes, triton, tuning
from tests.pallas_kernels.gemm.weights import dense, integer_weight, random_weight, weight_struct
from tests.pallas_kernels.oracles import (
    GATES,
    NUMPY_DTYPES,
    QUICK,
    WEIGHT_FORMATS,
    as_array,
    relative_error,
    wide,
)


@functools.partial(jax.jit, static_argnames="splits", compiler_options=QUICK)
def interpreted(x: jax.Array, weight: QuantizedTensor, splits: int) -> jax.Array:
    config = dataclasses.replace(tuning.configure(x.shape[0], weight), splits=splits)
    return triton.matmul(x, weight, config, interpret=True)


def activations(rng: np.random.Generator, rows: int, channels: int, dtype: str) -> jax.Array:
    """Normal, with one channel 50 times as strong as the rest."""
    x = rng.standard_normal((rows, channels))
    x[:, channels // 3] *= 50
    return as_array(x, dtype)


# Every format; few and many rows, ragged or not; N and K that no tile divides; splits.
CASES = [
    ("uint4:g128", 1, 512, 128, 1, "bfloat16", "float16"),
    ("uint4:g128", 17, 384, 200, 2, "float16", "bfloat16"),
    ("uint4:g64", 3, 320, 65, 2, "bfloat16", "bfloat16"),
    ("uint4:g32", 16, 416, 130, 3, "float16", "float16"),
    ("uint4:g32", 53, 32, 7, 1, "bfloat16", "float16"),
    ("uint4:gK", 16, 700, 96, 3, "bfloat16", "float16"),
    ("uint8:g128", 53, 384, 200, 2, "bfloat16", "float16"),
    ("uint8:g128", 1, 640, 64, 3, "float16", "float16"),
    ("uint8:g64", 17, 192, 130, 1, "float16", "bfloat16"),
    ("uint8:g32", 3, 352, 72, 3, "bfloat16", "bfloat16"),
    ("uint8:gK", 53, 300, 33, 1, "float16", "float16"),
    ("uint8:gK", 1, 256, 64, 2, "bfloat16", "bfloat16"),
]


@pytest.mark.parametrize(
    ("text", "rows", "channels", "outputs", "splits", "dtype", "scale_dtype"), CASES
)
def test_against_float64(text, rows, channels, outputs, splits, dtype, scale_dtype, rng):
    weight = random_weight(rng, text, channels, outputs, scale_dtype)
    x = activations(rng, rows, channels, dtype)
    product = interpreted(x, weight, splits)
    assert product.dtype == x.dtype
    assert relative_error(product, wide(x) @ dense(weight)) < GATES[dtype]


@settings(max_examples=5)
@given(
    text=st.sampled_from(WEIGHT_FORMATS),
    rows=st.integers(1, 40),
    groups=st.integers(1, 5),
    outputs=st.integers(1, 150),
    splits=st.integers(1, 4),
    dtype=st.sampled_from(["bfloat16", "float16"]),
)
def test_integers_are_exact(text, rows, groups, outputs, splits, dtype):
    rng = np.random.default_rng(rows * outputs)
    weight = integer_weight(rng, text, groups * 128, outputs)
    x = rng.integers(-2, 3, (rows, groups * 128))
    product = np.asarray(interpreted(as_array(x, dtype), weight, splits))
    expected = (x @ dense(weight)).astype(NUMPY_DTYPES[dtype])
    np.testing.assert_array_equal(product, expected)


def test_more_splits_than_blocks(rng):
    weight = integer_weight(rng, "uint8:g32", 32, 16)
    x = rng.integers(-2, 3, (2, 32))
    product = np.asarray(interpreted(as_array(x, "float16"), weight, 4))
    np.testing.assert_array_equal(product, x @ dense(weight))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("text", "channels", "outputs"),
    [("uint4:g32", 416, 65), ("uint4:g128", 128, 64), ("uint4:gK", 300, 9), ("uint8:g64", 192, 70)],
)
def test_dequantize_is_exact(text, channels, outputs, dtype, rng):
    weight = random_weight(rng, text, channels, outputs)
    write = functools.partial(triton.dequantize, dtype=jnp.dtype(dtype), interpret=True)
    matrix = np.asarray(jax.jit(write, compiler_options=QUICK)(weight))
    assert matrix.shape == (outputs, weight.padded_channels)
    expected = dense(weight).T.astype(NUMPY_DTYPES[dtype])
    np.testing.assert_array_equal(matrix[:, :channels], expected)
    # What pads K meets zeros of x, so that it must be a number.
    assert np.isfinite(matrix.astype(np.float32)).all()


@pytest.mark.parametrize("text", WEIGHT_FORMATS)
def test_lowers_for_named_shapes(text, lower_for_cuda):
    """Every configuration that is chosen for a named shape: different sizes lower alike."""
    lowered = set()
    for shape in shapes.QWEN3_8B + shapes.LLAMA3_70B + shapes.SMALL:
        weight = weight_struct(text, shape.channels, shape.outputs)
        for rows, dtype in ((1, "bfloat16"), (16, "float16"), (64, "bfloat16"), (256, "bfloat16")):
            config = tuning.configure(rows, weight)
            ragged = (rows % config.tile_m > 0, shape.outputs % config.tile_n > 0)
            key = (dataclasses.replace(config, splits=min(config.splits, 2)), ragged, dtype)
            if key in lowered:
                continue
            lowered.add(key)
            x = jax.ShapeDtypeStruct((rows, shape.channels), dtype)
            multiply = functools.partial(triton.matmul, config=config)
            kernel = lower_for_cuda(multiply, x, weight)
            assert f'name = "matmul_{weight.format.codes}"' in kernel
            assert "lop3.b32" in kernel
    assert lowered


@pytest.mark.parametrize("text", WEIGHT_FORMATS)
def test_dequantize_lowers(text, lower_for_cuda):
    dequantize = functools.partial(triton.dequantize, dtype=jnp.dtype(jnp.bfloat16))
    for shape in (shapes.QWEN3_8B[0], *shapes.SMALL):
        weight = weight_struct(text, shape.channels, shape.outputs)
        assert "triton" in lower_for_cuda(dequantize, weight)


@jax.jit
def reference_product(x: jax.Array, weight: QuantizedTensor) -> jax.Array:
    return reference.matmul(x.astype(jnp.float32), weight)  # float32, hundreds of times finer


@pytest.mark.gpu
@pytest.mark.parametrize("text", ["uint4:g128", "uint8:g128"])
@pytest.mark.parametrize("shape", shapes.QWEN3_8B, ids=lambda shape: shape.name)
def test_qwen3_8b_on_the_gpu(shape, text, rng):
    weight = random_weight(rng, text, shape.channels, shape.outputs)
    for dtype, sizes in (("bfloat16", (1, 16, 64, 256, 1024)), ("float16", (16,))):
        x = activations(rng, max(sizes), shape.channels, dtype)
        expected = wide(reference_product(x, weight))
        for rows in sizes:
            product = jax.jit(matmul)(x[:rows], weight)
            error = relative_error(product, expected[:rows])
            assert error < GATES[dtype], f"{rows} rows in {dtype}"


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["triton", "dequantize"])
@pytest.mark.parametrize("text", WEIGHT_FORMATS)
def test_all_formats_on_the_gpu(text, implementation, rng):
    multiply = jax.jit(functools.partial(matmul, implementation=implementation))
    for rows, channels, outputs, dtype, scale_dtype in (
        (1, 2048, 4096, "bfloat16", "float16"),
        (3, 1408, 200, "float16", "bfloat16"),
        (17, 384, 1000, "bfloat16", "bfloat16"),
        (53, 4096, 513, "float16", "float16"),
        (200, 512, 128, "bfloat16", "float16"),
    ):
        weight = random_weight(rng, text, channels, outputs, scale_dtype)
        x = activations(rng, rows, channels, dtype)
        error = relative_error(multiply(x, weight), wide(x) @ dense(weight))
        assert error < GATES[dtype], f"{rows} × {channels} × {outputs} in {dtype}"


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 2, 7])
@pytest.mark.parametrize("text", WEIGHT_FORMATS)
def test_integers_are_exact_on_the_gpu(text, splits, rng):
    weight = integer_weight(rng, text, 1152, 200)
    x = rng.integers(-2, 3, (21, 1152))
    config = dataclasses.replace(tuning.configure(21, weight), splits=splits)
    multiply = jax.jit(functools.partial(triton.matmul, config=config))
    for dtype, numpy_dtype in NUMPY_DTYPES.items():
        product = np.asarray(multiply(as_array(x, dtype), weight))
        np.testing.assert_array_equal(product, (x @ dense(weight)).astype(numpy_dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("text", WEIGHT_FORMATS)
def test_dequantize_is_exact_on_the_gpu(text, dtype, rng):
    weight = random_weight(rng, text, 1408, 1000)
    dequantize = functools.partial(triton.dequantize, dtype=jnp.dtype(dtype))
    matrix = np.asarray(jax.jit(dequantize)(weight))[:, :1408]
    expected = dense(weight).T.astype(NUMPY_DTYPES[dtype])
    np.testing.assert_array_equal(matrix, expected)
