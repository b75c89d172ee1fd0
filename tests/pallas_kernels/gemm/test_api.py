from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import UnsupportedError, matmul
from mpjax.kernels.activations import QuantizedActivations, quantize_activations
from mpjax.kernels.gemm import dequantize, reference, shapes, triton, xla
from mpjax.kernels.gemm.api import matmul_terms
from mpjax.kernels.gemm.plans.configuration import TritonConfig
from mpjax.kernels.gemm.plans.operation import forced, plan_of
from mpjax.kernels.gemm.plans.problem import Problem
from mpjax.kernels.plans.plan import Plan
from tests.pallas_kernels.gemm.weights import (
    dense,
    exact,
    random_weight,
    weight_struct,
)
from tests.pallas_kernels.oracles import GATES, as_array, random_array, relative_error, wide
from tests.sweeps import combinations, in_sweep

# One of each kind of codes.
KINDS = (
    *("uint4:g128", "uint8:gK", "table4:g64", "table3:g64", "table2:g64", "float8:g128"),
    *("affine4:g32", "affine8:g32"),
    *("float8:gK/float8", "float8:g128/float8", "int8:gK/int8", "liquid4:g64/int8"),
    "int4:g128/int8",
    "float4:g32",
)
# The formats of W4A16, W4A8 and W8A8 models.
MEASURED = ("uint4:g128", "liquid4:g64/int8", "int8:gK/int8")
EIGHT_BITS = ("int8:gK/int8", "float8:gK/float8")
SMALL_TILES = Plan("triton", TritonConfig(16, 16, 1, 1, 3))


@combinations(
    1,
    leading=[(), (2, 3), (2, 0)],
    text=["plain", "uint4:g32", "int8:gK/int8", "float8:g128/float8"],
)
def test_leading_axes_are_kept(leading, text, rng):
    weight = random_weight(rng, "uint4:g32" if text == "plain" else text, 128, 10)
    matrix = dense(weight)
    x = random_array(rng, (*leading, 128), "float32")
    product = matmul(x, as_array(matrix, "float32") if text == "plain" else weight)
    assert (product.shape, product.dtype) == ((*leading, 10), jnp.float32)
    if x.size and weight.format.operand:
        x = exact(quantize_activations(x, weight.format))
    np.testing.assert_allclose(wide(product), wide(x) @ matrix, rtol=1e-4, atol=1e-3)


def test_a_plain_weight_is_a_plain_dot(rng):
    x, weight = random_array(rng, (3, 8), "bfloat16"), random_array(rng, (8, 5), "bfloat16")
    product = matmul(x, weight)
    assert product.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(product), np.asarray(x @ weight))
    product = matmul(x, weight, out_dtype="float32")
    assert product.dtype == jnp.float32
    assert relative_error(product, wide(x) @ wide(weight)) < 1e-6


@pytest.mark.one_of(3)
@pytest.mark.parametrize("text", ["float8:gK/float8", "float8:g128/float8", "liquid4:g64/int8"])
def test_activations_may_come_quantized(text, rng):
    weight = random_weight(rng, text, 256, 10)
    x = random_array(rng, (2, 3, 256), "bfloat16")
    quantized = quantize_activations(x, weight.format)
    expected = np.asarray(matmul(x, weight))
    product = matmul(quantized, weight)
    assert product.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(product), expected)


@pytest.mark.parametrize("text", ["plain", "uint4:g32"])
def test_channels_must_agree(text, rng):
    weight = random_weight(rng, "uint4:g32", 64, 10) if text != "plain" else jnp.ones((64, 10))
    with pytest.raises(ValueError, match=r"x has 96 channels in shape \(2, 96\).* expects 64"):
        matmul(jnp.ones((2, 96)), weight)


def int8_rows(scales: tuple[int, ...], dtype: str = "int8") -> QuantizedActivations:
    return QuantizedActivations(jnp.ones((2, 128), dtype), jnp.ones(scales), "bfloat16")


@pytest.mark.parametrize(
    ("text", "x", "message"),
    [
        ("uint4:g32", int8_rows((2, 1)), "uint4:g32 multiplies 16-bit activations"),
        ("int8", int8_rows((2, 2)), r"shape \(2, 2\); int8:gK/int8 expects int8 and \(2, 1\)"),
        ("liquid4:g64", int8_rows((2, 1), "float8_e4m3fn"), "float8_e4m3fn values .* expects int8"),
        ("float8:g128/float8", int8_rows((2, 1)), "has int8 values .* expects float8_e4m3fn"),
        ("float8:gK/float8", int8_rows((1, 1), "float8_e4m3fn"), r"\(1, 1\); .*\(2, 1\)"),
    ],
)
def test_quantized_activations_must_suit_the_format(text, x, message, rng):
    with pytest.raises(ValueError, match=message):
        matmul(x, random_weight(rng, text, 128, 10))


def test_what_a_plain_weight_has_no_use_for_is_refused():
    plain = jnp.ones((128, 10))
    with pytest.raises(ValueError, match="x is quantised, but the weight is a plain array"):
        matmul(int8_rows((2, 1)), plain)
    with pytest.raises(ValueError, match="there are scales, but the weight is a plain array"):
        matmul(jnp.ones((2, 128)), plain, scales=jnp.ones((1, 10)))
    with pytest.raises(ValueError, match="implementation is 'triton', but the weight is a plain"):
        matmul(jnp.ones((2, 128)), plain, implementation="triton")


@pytest.mark.parametrize("text", ["uint4:gK", "float8:gK", "float8:g128/float8", "liquid4:g64"])
def test_xla_needs_a_plain_matrix(text, rng):
    weight = random_weight(rng, text, 128, 10)
    with pytest.raises(UnsupportedError, match=f"'xla' can't run: {weight.format} is not a plain"):
        matmul(jnp.ones((2, 128)), weight, implementation="xla")


@pytest.fixture
def chosen(monkeypatch) -> list[str]:
    """The implementations that are traced, in the place of their work."""
    calls: list[str] = []

    def record(name, shape_of, x, weight, *rest):
        calls.append(name)
        values = x.values if isinstance(x, QuantizedActivations) else x
        return jnp.zeros(shape_of(values.shape[0], weight.shape[1]), rest[-1])

    for module, function, shape_of in (
        (triton, "matmul_terms", lambda rows, outputs: (1, rows, outputs)),
        (dequantize, "matmul", lambda rows, outputs: (rows, outputs)),
        (xla, "matmul", lambda rows, outputs: (rows, outputs)),
        (reference, "matmul", lambda rows, outputs: (rows, outputs)),
    ):
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(module, function, functools.partial(record, name, shape_of))
    return calls


def test_the_plan_is_followed(chosen, pretend_gpu):
    x, weight = jax.ShapeDtypeStruct((3, 128), jnp.bfloat16), weight_struct("int8", 128, 8)
    for plan in (Plan("dequantize"), Plan("xla"), SMALL_TILES):
        with forced(plan):
            jax.eval_shape(functools.partial(matmul), x, weight)
            jax.eval_shape(functools.partial(matmul, implementation="triton"), x, weight)
    assert chosen == ["dequantize", "triton", "xla", "triton", "triton", "triton"]


@pytest.mark.parametrize(
    ("implementation", "text", "channels"),
    [
        *(("triton", text, 256) for text in ("uint4:g32", "float8:gK/float8", "liquid4:g64/int8")),
        *(("dequantize", text, 256) for text in ("uint4:g32", "liquid4:g64/int8", *EIGHT_BITS)),
        *(("xla", text, 200) for text in EIGHT_BITS),
        *(("reference", text, 256) for text in ("uint4:g128", "table3:g64")),
        *(in_sweep("reference", t, 256) for t in KINDS if t not in ("uint4:g128", "table3:g64")),
    ],
)
def test_forced_implementations_agree(implementation, text, channels, rng, interpreted_triton):
    weight = random_weight(rng, text, channels, 40)
    x = random_array(rng, (2, 3, channels), "float16")
    multiply = functools.partial(matmul, implementation=implementation)
    with forced(SMALL_TILES):
        product = jax.jit(multiply)(x, weight)
    assert product.dtype == jnp.float16
    if weight.format.operand:
        x = exact(quantize_activations(x, weight.format))
    assert relative_error(product, wide(x) @ dense(weight)) < GATES["float16"]


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("bits", [in_sweep((4, 4, 4)), (4, 8, 4), (8, 8, 8)])
def test_blocks_of_all_mixtures(bits, implementation, rng, interpreted_triton):
    """Exact sums of each block, scaled per (token, block) and (output, group)."""
    weight = random_weight(rng, "int4:g128/int8", 300, 40, permuted=True)
    weight = dataclasses.replace(weight, activation_bits=jnp.asarray(bits, jnp.uint8))
    x = random_array(rng, (3, 5, 300), "bfloat16")
    rounded = quantize_activations(x, weight.activations, dtype="float32")
    assert np.abs(rounded.values[..., 128:256]).max() == 2 ** (bits[1] - 1) - 1
    expected = exact(rounded) @ dense(dataclasses.replace(weight, permutation=None))
    with forced(Plan("triton", TritonConfig(16, 32, 2, 2, 3))):
        product = matmul(rounded, weight, implementation=implementation)
        of_rows = matmul(x, weight, implementation=implementation, out_dtype="float32")
    np.testing.assert_allclose(product, expected, rtol=1e-5, atol=1e-4)
    assert relative_error(of_rows, expected) < 1e-3  # ties may be rounded the other way
    with pytest.raises(ValueError, match="order of a permutation, which the weight does not have"):
        matmul(rounded, dataclasses.replace(weight, permutation=None))


def test_terms_add_up_to_the_product(rng, interpreted_triton):
    weight = random_weight(rng, "uint8:gK", 384, 16)
    x = random_array(rng, (2, 3, 384), "bfloat16")
    with forced(Plan("triton", TritonConfig(16, 16, 3, 1, 3))):
        terms, product = matmul_terms(x, weight), matmul(x, weight)
    assert (terms.shape, terms.dtype) == ((3, 2, 3, 16), jnp.float32)
    np.testing.assert_array_equal(np.asarray(terms.sum(0).astype(x.dtype)), np.asarray(product))
    assert matmul_terms(x, weight, implementation="reference").shape == (1, 2, 3, 16)
    assert matmul_terms(x[:0], weight).shape == (1, 0, 3, 16)


@pytest.mark.one_of(5)
@pytest.mark.parametrize(
    "text", [in_sweep(t) if t.startswith(("affine", "table2", "uint8")) else t for t in KINDS]
)
def test_lowers_as_planned(text, lower_for_cuda, pretend_gpu):
    shape = shapes.QWEN3_8B[0]
    weight = weight_struct(text, shape.channels, shape.outputs)
    for rows in (1, 16, 64, 256, 1024) if text in MEASURED else (1, 1024):
        x = jax.ShapeDtypeStruct((rows, shape.channels), jnp.bfloat16)
        module = lower_for_cuda(matmul, x, weight)
        implementation = plan_of(Problem.of(rows, weight)).implementation
        is_fused = f'name = "matmul_{weight.format.codes}"' in module
        assert is_fused == (implementation == "triton"), f"{rows} rows"
        assert ("mosaic_gpu" in module) == (implementation == "mosaic"), f"{rows} rows"
        is_written_out = f'name = "dequantize_{weight.format.codes}"' in module
        assert is_written_out == (implementation == "dequantize" and not weight.format.is_flat)
    assert lower_for_cuda(jax.grad(lambda x, w: matmul(x, w).astype("float32").sum()), x, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("text", KINDS)
def test_many_rows_on_the_gpu(text, rng):
    """The implementations that are chosen for 300 and for 4096 rows."""
    weight = random_weight(rng, text, 1700 if ":gK" in text else 1792, 1000)
    matrix = dense(weight)
    for rows in (300, 4096):
        x = random_array(rng, (rows, weight.shape[0]), "bfloat16")
        product = jax.jit(matmul)(x, weight)
        if weight.format.operand:
            x = exact(jax.jit(quantize_activations, static_argnums=1)(x, weight.format))
        assert relative_error(product, wide(x) @ matrix) < GATES["bfloat16"], f"{rows} rows"


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_act_order_on_the_gpu(rows, dtype, rng):
    weight = random_weight(rng, "uint4:g128", 1024, 512, permuted=True)
    x = random_array(rng, (rows, 1024), dtype)
    expected = wide(x) @ dense(weight)
    assert relative_error(jax.jit(matmul)(x, weight), expected) < GATES[dtype]
