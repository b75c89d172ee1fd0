from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import UnsupportedError, WeightFormat, device, matmul
from mpjax.kernels.activations import QuantizedActivations, quantize_activations
from mpjax.kernels.gemm import dequantize, reference, shapes, triton, xla
from mpjax.kernels.gemm.api import matmul_terms
from mpjax.kernels.gemm.plans.configuration import TritonConfig
from mpjax.kernels.gemm.plans.operation import forced, plan_of
from mpjax.kernels.gemm.plans.problem import Problem
from mpjax.kernels.plans.plan import Plan
from tests.pallas_kernels.gemm.weights import (
    ALL_FORMATS,
    dense,
    exact,
    random_activations,
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


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("text", ["uint4:g32", "int8:gK/int8"])
def test_the_result_has_the_dtype_that_is_asked_for(text, out_dtype, rng):
    weight = random_weight(rng, text, 128, 10)
    x = random_activations(rng, weight, 3, "bfloat16")
    assert matmul(x, weight).dtype == jnp.bfloat16
    product = matmul(x, weight, out_dtype=out_dtype)
    assert product.dtype == out_dtype
    assert relative_error(product, exact(x) @ dense(weight)) < GATES.get(out_dtype, 1e-6)
    assert matmul(jnp.zeros((0, 128)), weight, out_dtype=out_dtype).dtype == out_dtype


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


@pytest.mark.parametrize(("x", "found"), [("text", "'text'"), (np.float32(3), "a scalar")])
def test_x_and_the_weight_are_arrays(x, found, rng):
    weight = random_weight(rng, "uint4:g32", 64, 10)
    for arguments, name in (((x, weight), "x"), ((jnp.ones((2, 64)), x), "the weight")):
        with pytest.raises(ValueError, match=f"matmul: {name} is {found}: expected an array"):
            matmul(*arguments)
    lists = matmul([[1.0] * 64] * 2, weight)
    np.testing.assert_array_equal(lists, matmul(jnp.ones((2, 64)), weight))


def test_terms_are_of_packed_weights():
    with pytest.raises(ValueError, match="plain array; use matmul"):
        matmul_terms(jnp.ones((2, 64)), jnp.ones((64, 8)))  # type: ignore[arg-type]


def test_integers_are_refused(rng):
    weight = random_weight(rng, "uint4:g32", 64, 10)
    for x in (jnp.ones((2, 64), jnp.int32), np.ones((2, 64), np.int32)):
        with pytest.raises(ValueError, match="x is int32; expected floating point"):
            matmul(x, weight)  # type: ignore[arg-type]


def test_unknown_implementations_are_refused(rng):
    weight = random_weight(rng, "uint4:g32", 64, 10)
    for x in (jnp.ones((2, 64)), jnp.ones((0, 64))):
        with pytest.raises(ValueError, match="unknown implementation 'cuda': expected triton"):
            matmul(x, weight, implementation="cuda")  # type: ignore[arg-type]


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


def test_activations_of_groups_need_a_scale_for_each(rng):
    weight = random_weight(rng, "float8:g128/float8", 384, 10)
    x = QuantizedActivations(jnp.ones((2, 384), "float8_e4m3fn"), jnp.ones((2, 1)), "bfloat16")
    with pytest.raises(ValueError, match=r"\(2, 1\); .* expects float8_e4m3fn and \(2, 3\)"):
        matmul(x, weight)


def test_what_a_plain_weight_has_no_use_for_is_refused():
    plain = jnp.ones((128, 10))
    with pytest.raises(ValueError, match="x is quantised, but the weight is a plain array"):
        matmul(int8_rows((2, 1)), plain)
    with pytest.raises(ValueError, match="there are scales, but the weight is a plain array"):
        matmul(jnp.ones((2, 128)), plain, scales=jnp.ones((1, 10)))
    with pytest.raises(ValueError, match="implementation is 'triton', but the weight is a plain"):
        matmul(jnp.ones((2, 128)), plain, implementation="triton")


@pytest.mark.parametrize("implementation", ["triton", "dequantize"])
def test_kernels_need_a_gpu(implementation, rng, monkeypatch):
    monkeypatch.setattr(device, "why_triton_cannot_run", lambda: "there is no GPU")
    weight = random_weight(rng, "uint4:g32", 64, 10)
    with pytest.raises(UnsupportedError, match=f"matmul: '{implementation}'.*there is no GPU"):
        matmul(jnp.ones((2, 64), jnp.bfloat16), weight, implementation=implementation)


@pytest.mark.parametrize("implementation", ["triton", "dequantize"])
def test_kernels_need_sixteen_bits(implementation, rng, pretend_gpu):
    weight = random_weight(rng, "uint4:g32", 64, 10)
    with pytest.raises(UnsupportedError, match="activations are float32, expected bfloat16"):
        matmul(jnp.ones((2, 64)), weight, implementation=implementation, out_dtype="bfloat16")


@pytest.mark.parametrize("text", ["uint4:gK", "float8:gK", "float8:g128/float8", "liquid4:g64"])
def test_xla_needs_a_plain_matrix(text, rng):
    weight = random_weight(rng, text, 128, 10)
    with pytest.raises(UnsupportedError, match=f"'xla' can't run: {weight.format} is not a plain"):
        matmul(jnp.ones((2, 128)), weight, implementation="xla")


def test_fp8_products_need_a_gpu_that_has_them(rng, pretend_gpu, monkeypatch):
    monkeypatch.setattr(device, "compute_capability", lambda: 8.6)
    weight = random_weight(rng, "float8:gK/float8", 128, 10)
    with pytest.raises(UnsupportedError, match=r"'triton' can't run: .*8\.9.*8\.6"):
        matmul(jnp.ones((2, 128), jnp.bfloat16), weight, implementation="triton")


def test_float32_says_that_it_is_slow_on_a_gpu(rng, pretend_gpu):
    weight = random_weight(rng, "uint4:g32", 64, 10)
    with pytest.warns(UserWarning, match="plain JAX on this GPU.*activations are float32"):
        matmul(jnp.ones((2, 64)), weight)


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


@pytest.mark.parametrize(
    ("text", "rows", "dtype", "expected"),
    [
        ("uint4:g32", 1, "bfloat16", "triton"),
        ("table3:g32", 17, "float16", "triton"),
        ("uint4:g32", 5000, "bfloat16", "dequantize"),
        ("liquid4:g64/int8", 2000, "bfloat16", "triton"),
        ("liquid4:g64/int8", 5000, "bfloat16", "dequantize"),
        ("float8:g128/float8", 5000, "float16", "dequantize"),
        ("int8:gK/int8", 5000, "bfloat16", "triton"),
        ("float8:gK/float8", 5000, "bfloat16", "xla"),
        ("int8:gK/int8", 1, "float32", "triton"),
    ],
)
def test_the_implementation_on_a_gpu(text, rows, dtype, expected, chosen, pretend_gpu):
    x = jax.ShapeDtypeStruct((rows, 128), dtype)
    assert jax.eval_shape(matmul, x, weight_struct(text, 128, 8)).shape == (rows, 8)
    assert chosen == [expected]


def test_warpgroups_say_whose_scales_they_can_not_hold(pretend_gpu):
    x, weight = jax.ShapeDtypeStruct((64, 256), jnp.float16), weight_struct("float8:g128", 256, 64)
    with pytest.raises(UnsupportedError, match="scales are float32, whose range float16 does not"):
        jax.eval_shape(functools.partial(matmul, implementation="mosaic"), x, weight)


def test_a_weight_too_large_to_be_written_out_is_multiplied_as_it_is(chosen, pretend_gpu):
    x = jax.ShapeDtypeStruct((5000, 16384), jnp.bfloat16)
    weight = weight_struct("liquid4:g64", 16384, 163841)  # 2**31 codes and more, in half the bytes
    jax.eval_shape(matmul, x, weight)
    assert chosen == ["triton"]
    with pytest.raises(UnsupportedError, match=r"'dequantize' can't run: .* more than 2\*\*31"):
        jax.eval_shape(functools.partial(matmul, implementation="dequantize"), x, weight)


def test_the_plan_is_followed(chosen, pretend_gpu):
    x, weight = jax.ShapeDtypeStruct((3, 128), jnp.bfloat16), weight_struct("int8", 128, 8)
    for plan in (Plan("dequantize"), Plan("xla"), SMALL_TILES):
        with forced(plan):
            jax.eval_shape(functools.partial(matmul), x, weight)
            jax.eval_shape(functools.partial(matmul, implementation="triton"), x, weight)
    assert chosen == ["dequantize", "triton", "xla", "triton", "triton", "triton"]


@pytest.mark.parametrize(
    ("text", "expected"), [("uint4:g32", "reference"), ("float8:gK/float8", "xla")]
)
def test_without_a_gpu(text, expected, rng, chosen, monkeypatch):
    monkeypatch.setattr(device, "why_triton_cannot_run", lambda: "there is no GPU")
    weight = random_weight(rng, text, 128, 8)
    matmul(jnp.ones((1, 128), jnp.bfloat16), weight)
    matmul(jnp.ones((5000, 128), jnp.bfloat16), weight)
    assert chosen == ["reference", expected]


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


@pytest.mark.parametrize(
    ("implementation", "text", "channels"),
    [
        ("triton", "uint4:g32", 192),
        in_sweep("triton", "int8:gK/int8", 100),
        in_sweep("dequantize", "uint8:gK", 100),
        ("dequantize", "liquid4:g64/int8", 192),
        ("xla", "float8:gK/float8", 128),
        in_sweep("reference", "table3:g32", 192),
        in_sweep("reference", "float8:g128/float8", 256),
        in_sweep("reference", "liquid4:g64/int8", 192),
    ],
)
def test_act_order(implementation, text, channels, rng, interpreted_triton):
    weight = random_weight(rng, text, channels, 40, permuted=True)
    x = random_array(rng, (2, 3, channels), "float16")
    multiply = functools.partial(matmul, implementation=implementation)
    with forced(SMALL_TILES):
        product = jax.jit(multiply)(x, weight)
    packed = x[..., np.asarray(weight.permutation)]
    if weight.format.operand:
        packed = exact(quantize_activations(packed, weight.format))
    expected = wide(packed) @ dense(dataclasses.replace(weight, permutation=None))
    assert relative_error(product, expected) < GATES["float16"]


def test_quantized_activations_have_no_act_order(rng):
    weight = random_weight(rng, "int8", 128, 8, permuted=True)
    with pytest.raises(ValueError, match="x is quantised, but the weight has a permutation"):
        matmul(int8_rows((2, 1)), weight)


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


def test_symmetry_counts_only_where_it_is_cheaper(rng, pretend_gpu, monkeypatch):
    weight, seen = random_weight(rng, "uint4:g128:sym", 256, 16), []

    def record(rows, weight, config, dtype):
        seen.append((str(weight.format), config))
        return jnp.zeros((1, rows.shape[0], weight.shape[1]), dtype)

    monkeypatch.setattr(triton, "matmul_terms", record)
    for dtype in ("bfloat16", "float16"):
        assert matmul(random_array(rng, (2, 256), dtype), weight).dtype == dtype
    assert [text for text, _ in seen] == ["uint4:g128:sym", "uint4:g128"]
    assert [config.scaling for _, config in seen] == ["weight", "accumulator"]


def test_other_values_do_not_retrace(rng, trace_counter):
    multiply = trace_counter(matmul)
    compiled = jax.jit(multiply)
    for _ in range(2):
        compiled(random_array(rng, (2, 64), "float32"), random_weight(rng, "uint4:g32", 64, 10))
    assert multiply.count == 1


def test_every_kind_of_codes_is_tried():
    assert {WeightFormat.parse(t).codes for t in KINDS} == {
        WeightFormat.parse(t).codes for t in ALL_FORMATS
    }


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


@pytest.mark.gpu
def test_float32_uses_the_reference_on_the_gpu(rng):
    weight = random_weight(rng, "uint4:g128", 256, 64)
    x = random_array(rng, (4, 256), "float32")
    assert relative_error(matmul(x, weight), wide(x) @ dense(weight)) < 1e-5
