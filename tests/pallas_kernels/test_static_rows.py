from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from mpjax.kernels import (
    ActivationFormat,
    StaticRows,
    add_rms_norm,
    gated,
    hadamard,
    matmul,
    pack,
    partition_specs,
    quantize,
    quantize_activations,
    quantize_rows,
    unpack,
)
from mpjax.kernels.cutting import Run, cut_inputs, join_inputs
from mpjax.kernels.packed_shapes import packed_shapes
from tests.pallas_kernels.oracles import random_array

INT8, FLOAT8 = ActivationFormat("int8"), ActivationFormat("float8")
SCALE = np.float32(2**-5)  # of some values, which are cut off; quotients are exact


def expected_codes(x, values, scale=SCALE):
    scaled = np.asarray(x, np.float32) / scale
    if values == "int8":
        return np.clip(np.rint(scaled), -128, 127)
    return np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


def static(values="int8", scale=SCALE):
    return StaticRows(ActivationFormat(values), jnp.full(1, scale))


@pytest.mark.parametrize("values", ["int8", "float8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_codes_are_the_nearest_to_x_over_the_scale(values, dtype, rng):
    x = random_array(rng, (2, 3, 64), dtype) * 2
    scale = SCALE if values == "int8" else SCALE / 8
    assert abs(np.asarray(x, np.float32)).max() > scale * (128 if values == "int8" else 448)
    for found in (
        quantize_activations(x, static(values, scale)),
        quantize_rows(x, static(values, scale)),
        quantize_rows(x, static(values, scale), implementation="reference"),
    ):
        codes = np.asarray(found.values.astype(jnp.float32))
        np.testing.assert_array_equal(codes, expected_codes(x, values, scale))
        np.testing.assert_array_equal(found.scales, np.full((2, 3, 1), scale))
        assert found.dtype == dtype


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_has_no_scale(value):
    x = jnp.ones((3, 8)).at[1, 2].set(value)
    scales = quantize_activations(x, static()).scales[:, 0]
    np.testing.assert_array_equal(np.isnan(scales), [False, True, False])


def test_a_norm_and_a_gate_round_their_results(rng):
    terms = random_array(rng, (2, 5, 128), "float32")
    residual, weight = random_array(rng, (5, 128), "float32"), jnp.ones(128)
    stream, normed = add_rms_norm(terms, residual, weight, 1e-6, format=static())
    plain_stream, plain = add_rms_norm(terms, residual, weight, 1e-6)
    np.testing.assert_array_equal(stream, plain_stream)
    np.testing.assert_array_equal(normed.values, expected_codes(plain, "int8"))
    gate = gated(terms, "silu", dtype="float32", format=static())
    plain = gated(terms, "silu", dtype="float32")
    np.testing.assert_array_equal(gate.values, expected_codes(plain, "int8"))
    turned = gated(terms, "silu", dtype="float32", format=static(), hadamard=16)
    np.testing.assert_array_equal(turned.values, expected_codes(hadamard(plain, 16), "int8"))


@pytest.mark.parametrize("text", ["int8/int8", "float8:gK/float8"])
def test_a_product_rounds_by_the_weight(text, rng):
    weight = quantize(random_array(rng, (128, 24), "float32"), text)
    packed = pack(dataclasses.replace(unpack(weight), activation_scale=jnp.full(1, SCALE)))
    values = packed.format.operand
    assert packed.activations == StaticRows(ActivationFormat(values), packed.activation_scale)
    assert unpack(packed).activation_scale == SCALE
    x = random_array(rng, (5, 128), "float32")
    found = matmul(x, packed)
    expected = expected_codes(x, values) @ np.asarray(weight.dequantize()) * SCALE
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert abs(found - matmul(x, weight)).max() > 1e-3


@pytest.mark.parametrize("text", ["int8/int8", "float8:gK/float8"])
def test_fusions_round_and_kernels_multiply_on_cuda(text, rng, pretend_gpu, lower_for_cuda):
    weight = quantize(random_array(rng, (256, 128), "float32"), text)
    weight = dataclasses.replace(weight, activation_scale=jnp.ones(1))

    def product(x, weight):
        _, normed = add_rms_norm(
            x[None], None, jnp.ones(256, "bfloat16"), 1e-6, format=weight.activations
        )
        return matmul(normed, weight)

    program = lower_for_cuda(product, jnp.ones((4, 256), "bfloat16"), weight)
    kernels = re.findall(r'name = "(\w+)", num_stages', program)
    assert kernels == [f"matmul_{weight.format.codes}"]


@pytest.mark.gpu
@pytest.mark.parametrize("text", ["int8/int8", "float8:gK/float8"])
@pytest.mark.parametrize("rows", [1, 300])
def test_products_on_the_gpu(text, rows, rng):
    weight = quantize(random_array(rng, (1024, 512), "float32"), text)
    weight = dataclasses.replace(weight, activation_scale=jnp.full(1, SCALE))
    x = random_array(rng, (rows, 1024), "bfloat16")
    found = np.asarray(jax.jit(matmul)(x, weight), np.float64)
    codes = expected_codes(x, weight.format.operand) * SCALE
    expected = codes @ np.asarray(weight.dequantize(), np.float64)
    assert abs(found - expected).mean() < 8e-3 * abs(expected).mean()


def test_a_share_keeps_the_scale(rng):
    plain = unpack(quantize(random_array(rng, (256, 8), "float32"), "int8"))
    weight = pack(dataclasses.replace(plain, activation_scale=jnp.full(1, SCALE)))
    runs = [Run(0, 128, 128), Run(128, 256, 128)]
    parts = [cut_inputs(weight, runs, number) for number in (0, 1)]
    assert [part.activation_scale for part in parts] == [SCALE, SCALE]
    joined = join_inputs(parts, runs, weight.format)
    jax.tree.map(np.testing.assert_array_equal, joined, weight)
    mesh = jax.sharding.AbstractMesh((2,), ("a",))
    specs = partition_specs(weight, mesh, k="a")
    assert specs.activation_scale == PartitionSpec(None)
    found = packed_shapes((256, 8), weight.format, "float32", static=True)
    assert found == jax.eval_shape(lambda: weight)


@pytest.mark.parametrize(
    ("format", "scale", "message"),
    [
        ("uint4:g64", np.ones(1, np.float32), "uint4:g64 does not round rows of activations"),
        ("float8:g128/float8", np.ones(1, np.float32), "does not round rows of activations"),
        ("int8", np.ones(1, np.float16), "activation_scale: the dtype is float16; expected float3"),
        ("int8", np.ones((), np.float32), "activation_scale: the shape is (), and int8:gK/int8 ex"),
        ("int8", np.zeros(1, np.float32), "activation_scale is 0.0: expected positive and finite"),
        ("int8", np.full(1, np.nan, np.float32), "expected positive and finite"),
    ],
)
def test_scales_that_do_not_fit_a_weight(format, scale, message, rng):
    plain = unpack(quantize(random_array(rng, (128, 8), "float32"), format))
    with pytest.raises(ValueError, match=re.escape(message)):
        pack(dataclasses.replace(plain, activation_scale=scale))
