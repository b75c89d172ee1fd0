from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import ProductFormat, QuantizedTensor, WeightFormat, device, replace_scales
from mpjax.kernels.activations import QuantizedActivations, quantize_activations
from mpjax.kernels.gemm import shapes, triton
from mpjax.kernels.gemm.plans.configuration import TritonConfig
from mpjax.kernels.gemm.plans.limits import can_scale_weights
from mpjax.kernels.gemm.plans.operation import triton_config_of
from mpjax.kernels.gemm.plans.problem import Problem
from mpjax.kernels.gemm.plans.triton_rule import triton_by_rule
from tests.pallas_kernels.gemm.weights import (
    ALL_FORMATS,
    INTEGER_FORMATS,
    dense,
    exact,
    integer_activations,
    integer_weight,
    integers,
    output_channels,
    random_activations,
    random_weight,
    weight_struct,
)
from tests.pallas_kernels.oracles import GATES, relative_error
from tests.sweeps import combinations, in_sweep

each_format = pytest.mark.parametrize("text", ALL_FORMATS)
# The rows that every kind of codes is tried with, in one format each; the others have fewer.
ROWS = (1, 3, 16, 17, 32, 53, 64, 128, 1000)
MAIN = (
    *("uint4:g128", "uint4:g128:sym", "uint8:g128", "table4:g64", "table3:g64", "table2:g64"),
    *("float8:g128", "float8:gK/float8", "float8:g128/float8", "int4:g128/int8", *INTEGER_FORMATS),
)


def accumulated(tile_m: int, tile_n: int, splits: int, width: int | None = None) -> TritonConfig:
    return TritonConfig(tile_m, tile_n, splits, 4, 3, "accumulator", width)


def weighted(tile_m: int, tile_n: int, splits: int, width: int | None = None) -> TritonConfig:
    return TritonConfig(tile_m, tile_n, splits, 4, 3, "weight", width)


def unsplit(outputs: int, config: TritonConfig) -> TritonConfig:
    return dataclasses.replace(config, unsplit=outputs)


# Every kind of codes; what no tile divides; splits, of all tiles or the last; both scalings; narrow
# steps.
CASES = [
    ("uint4:g32", 16, 416, 130, accumulated(16, 64, 3), "float16", "float16"),
    ("uint4:g64", 17, 320, 200, unsplit(128, weighted(16, 64, 2)), "bfloat16", "float16"),
    ("uint4:g128", 1, 384, 130, accumulated(16, 64, 2, 32), "bfloat16", "float16"),
    ("uint4:gK", 16, 700, 96, accumulated(16, 32, 3), "bfloat16", "float16"),
    ("uint8:g128", 53, 384, 200, weighted(64, 64, 2), "bfloat16", "float16"),
    ("uint8:gK", 1, 200, 64, accumulated(16, 64, 2, 32), "bfloat16", "bfloat16"),
    ("affine4:g32", 17, 160, 70, accumulated(16, 64, 2), "bfloat16", "float16"),
    ("table4:g128", 1, 384, 130, weighted(16, 64, 2, 32), "bfloat16", "bfloat16"),
    ("table3:g128", 1, 640, 65, accumulated(16, 64, 2, 16), "bfloat16", "float16"),
    ("table2:g256", 53, 768, 65, weighted(64, 64, 2, 32), "float16", "float16"),
    ("float8:gK", 53, 300, 64, accumulated(32, 64, 2), "float16", "float32"),
    ("float8:g128/float8", 17, 384, 70, accumulated(16, 64, 2), "bfloat16", "float32"),
    ("float8:gK/float8", 53, 300, 33, accumulated(64, 32, 2, 64), "bfloat16", "float32"),
    ("float4:g32", 17, 160, 70, accumulated(16, 64, 2), "bfloat16", "bfloat16"),
    ("int4:g128/int8", 5, 200, 130, unsplit(64, accumulated(16, 64, 2)), "bfloat16", "float32"),
    ("liquid4:g64/int8", 3, 192, 130, unsplit(64, accumulated(16, 64, 2)), "bfloat16", "uint16"),
    ("affine8:g64", 3, 192, 64, unsplit(32, accumulated(16, 32, 2)), "bfloat16", "float16"),
    ("float8:g128", 17, 384, 70, weighted(16, 64, 2), "bfloat16", "float32"),
    ("int8:gK/int8", 17, 300, 70, accumulated(16, 64, 1), "float32", "float32"),
    ("float4:g32", 53, 288, 33, weighted(32, 32, 1), "bfloat16", "bfloat16"),
]
each_case = pytest.mark.parametrize(
    ("text", "rows", "channels", "outputs", "config", "dtype", "scale_dtype"),
    CASES,
)


@functools.partial(jax.jit, static_argnames=("config", "dtype"))
def interpreted(
    x: jax.Array | QuantizedActivations, weight: QuantizedTensor, config: TritonConfig, dtype: str
) -> jax.Array:
    return triton.matmul(x, weight, config, jnp.dtype(dtype), interpret=True)


@each_case
def test_against_float64(text, rows, channels, outputs, config, dtype, scale_dtype, rng):
    weight = random_weight(rng, text, channels, outputs, scale_dtype)
    x = random_activations(rng, weight, rows, dtype)
    product = interpreted(x, weight, config, dtype)
    assert product.dtype == dtype
    gate = GATES.get(dtype, 1e-6)  # integers are exact, and only scaled in float32
    assert relative_error(product, exact(x) @ dense(weight)) < gate


@each_case
def test_integers_are_exact(text, rows, channels, outputs, config, dtype, scale_dtype, rng):
    weight = integer_weight(rng, text, channels, outputs, scale_dtype)
    x = integer_activations(rng, weight, rows, dtype)
    assert_exact(interpreted(x, weight, config, dtype), x, weight)


def assert_exact(product: jax.Array, x: jax.Array | QuantizedActivations, weight: QuantizedTensor):
    """The float64 product, which float32 holds exactly, rounded once."""
    expected = exact(x) @ dense(weight)
    np.testing.assert_array_equal(expected, expected.astype(np.float32))
    np.testing.assert_array_equal(np.asarray(product), expected.astype(product.dtype))


@pytest.mark.parametrize("text", INTEGER_FORMATS)
def test_integer_sums_are_exact_where_float32_is_not(text, rng):
    """Sums grow past 2**24 before the second half of K takes them back."""
    channels, outputs = 2816, 32
    weight = integer_weight(rng, text, channels, outputs)
    if text == "int8:gK/int8":
        words = rng.integers(110, 128, weight.words.shape).astype(np.int8)
        weight = dataclasses.replace(weight, words=jnp.asarray(words))
    else:
        steps = rng.integers(1, 9, weight.parameters.shape)
        parameters = ((steps + 2**8 * (255 - 15 * steps)) * (1 + 2**16)).astype(np.uint32)
        words = 0x88 | rng.integers(0, 256, weight.words.shape)  # codes from 8 to 15
        weight = dataclasses.replace(
            weight, words=jnp.asarray(words.astype(np.uint8)), parameters=jnp.asarray(parameters)
        )
    x = integer_activations(rng, weight, 3, "float32")
    values = rng.integers(115, 128, (3, channels)).astype(np.int8)
    values[:, channels // 2 :] *= -1
    x = dataclasses.replace(x, values=jnp.asarray(values))
    first_half = integers(weight)[: channels // 2]
    assert (values[:, : channels // 2] @ first_half).max() > 2**24
    assert_exact(interpreted(x, weight, accumulated(16, 32, 1), "float32"), x, weight)


@pytest.mark.one_of(5)
@combinations(
    1,
    text_and_dtype=[
        ("uint4:g32", "bfloat16"),
        ("uint8:g32", "bfloat16"),
        ("uint4:g32:sym", "bfloat16"),
        ("uint8:g64:sym", "bfloat16"),
        ("uint4:g64:sym", "float16"),
        ("affine4:g32", "bfloat16"),
        ("affine8:g64", "float16"),
        ("table4:g64", "float16"),
        ("table3:g32", "bfloat16"),
        ("table2:g64", "float16"),
        ("float8:g128", "bfloat16"),
    ],
    scaling=["accumulator", "weight"],
)
def test_with_its_ptx(text_and_dtype, scaling, rng, interpreted_ptx):
    text, dtype = text_and_dtype
    weight = integer_weight(rng, text, 128, 16, dtype)
    x = integer_activations(rng, weight, 2, dtype)
    config = TritonConfig(16, 16, 1, 1, 3, scaling)
    # Not compiled: a `jit` knows nothing of targets.
    multiply = triton.matmul_terms.__wrapped__  # type: ignore[attr-defined]
    [product] = multiply(x, weight, config, jnp.dtype(jnp.float32), interpret=True)
    assert_exact(product, x, weight)


def launch(config: TritonConfig, dtype: str, x: jax.Array, weight: QuantizedTensor) -> jax.Array:
    """Quantises x too, where the format wants it."""
    if weight.format.operand:
        x = quantize_activations(x, weight.format)
    return triton.matmul(x, weight, config, jnp.dtype(dtype))


@pytest.mark.one_of(5)
@pytest.mark.parametrize("text", [text if text in MAIN else in_sweep(text) for text in ALL_FORMATS])
def test_lowers_for_named_shapes(text, lower_for_cuda):
    """Configurations that are chosen for named shapes: different sizes lower alike."""
    format, lowered = WeightFormat.parse(text), set()
    named, all_rows = (shapes.SMALL[1], *shapes.QWEN3_8B[:1]), (1, 256)
    if text in MAIN:
        named, all_rows = (shapes.SMALL[1], *shapes.QWEN3_8B[2:]), (1, 16, 128)
    for shape in named:
        channels = shape.channels - shape.channels % (format.group_size or 1)
        weight = weight_struct(text, channels, shape.outputs)
        for rows in all_rows:
            config = triton_config_of(Problem.of(rows, weight))
            ragged = (rows % config.tile_m > 0, shape.outputs % config.tile_n > 0)
            splits = min(config.splits, 2, weight.padded_channels // format.block)
            key = (dataclasses.replace(config, splits=splits), ragged)
            if key in lowered:
                continue
            lowered.add(key)
            dtype = "float16" if rows == 16 else "bfloat16"
            x = jax.ShapeDtypeStruct((rows, channels), dtype)
            kernel = lower_for_cuda(functools.partial(launch, config, dtype), x, weight)
            assert f'name = "matmul_{format.codes}"' in kernel
            assert (".b32" in kernel) == (not format.is_flat), "inline PTX, where codes are packed"
    assert lowered


def gpu_config(rows: int, weight: QuantizedTensor) -> TritonConfig:
    """Sums scaled for few rows and weights for many; both, for 17 and 32."""
    format = weight.format
    config = triton_by_rule(Problem(rows, ProductFormat.of(format), *weight.shape, device.limits()))  # type: ignore[call-arg]
    if not can_scale_weights(format) or format.symmetric or rows >= 64:
        return config
    return dataclasses.replace(config, scaling="weight" if rows == 17 else "accumulator")


@pytest.mark.gpu
@each_format
def test_on_the_gpu(text, rng):
    """Against float64 in both dtypes; integers exact; and the same bits again."""
    channels = 1792 if WeightFormat.parse(text).group_size else 1700
    weight = random_weight(rng, text, channels, 1000)

    def multiply(all_rows, x, weight):
        def product(rows):
            x_rows = jax.tree.map(lambda leaf: leaf[:rows], x)
            dtype = jnp.dtype(x.dtype)
            return triton.matmul(x_rows, weight, gpu_config(rows, weight), dtype)

        return [product(rows) for rows in all_rows]

    compiled = jax.jit(multiply, static_argnums=0)
    for dtype, all_rows in (
        ("bfloat16", ROWS[::2] if text in MAIN else (17, 128)),
        # FP8 tensor cores keep some 14 bits of a sum: too few for the gate of float16.
        ("float16", () if "/float8" in text else (3, 64) if text in MAIN else (64,)),
    ):
        x = random_activations(rng, weight, ROWS[-1], dtype)
        expected = exact(x) @ dense(weight)
        products, again = compiled(all_rows, x, weight), compiled(all_rows, x, weight)
        for rows, product, repeated in zip(all_rows, products, again, strict=True):
            error = relative_error(product, expected[:rows])
            assert error < GATES[dtype], f"{rows} rows in {dtype}"
            np.testing.assert_array_equal(np.asarray(product), np.asarray(repeated))
        if dtype == "bfloat16":
            whole = integer_weight(rng, text, channels, 1000)
            x = integer_activations(rng, whole, ROWS[-1], dtype)
            expected = exact(x) @ dense(whole)
            for rows, product in zip(all_rows, compiled(all_rows, x, whole), strict=True):
                rounded = expected[:rows].astype(np.float32).astype(product.dtype)
                np.testing.assert_array_equal(np.asarray(product), rounded)


@pytest.mark.gpu
@combinations(
    1,
    text=["uint4:g128", "uint4:g128:sym", "table3:g64", "float8:gK/float8", *INTEGER_FORMATS],
    shape=shapes.QWEN3_8B,
    rows=[1, 16, 64, 128],
)
def test_qwen3_8b_on_the_gpu(text, shape, rows, rng):
    weight = random_weight(rng, text, shape.channels, shape.outputs)
    chosen = np.append(rng.choice(shape.outputs, 100), shape.outputs - 1)
    matrix = dense(output_channels(weight, chosen))
    config = triton_config_of(Problem.of(rows, weight))
    x = random_activations(rng, weight, rows, "bfloat16")
    multiply = functools.partial(triton.matmul, config=config, out_dtype=jnp.dtype("bfloat16"))
    product = np.asarray(jax.jit(multiply)(x, weight))[:, chosen]
    assert relative_error(product, exact(x) @ matrix) < GATES["bfloat16"]


@pytest.mark.parametrize("text", ["uint4:g32", "float8:g128"])
def test_scales_may_be_beyond_float16(text, rng):
    weight = random_weight(rng, text, 128, 16, "bfloat16")
    tiny = replace_scales(weight, weight.scales().astype(jnp.float32) * 2.0**-30)
    x = random_activations(rng, weight, 3, "float16")
    product = interpreted(x, tiny, weighted(16, 16, 1), "float32")
    assert relative_error(product, exact(x) @ dense(tiny)) < GATES["float16"]
