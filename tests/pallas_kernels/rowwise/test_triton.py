from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels.activations import quantize_activations
from mpjax.kernels.rowwise import reference, triton
from tests.pallas_kernels.oracles import random_array, wide
from tests.pallas_kernels.rowwise.rows import (
    EPSILON,
    QUANTIZING,
    Rows,
    assert_result,
    parsed,
    run,
    with_nearly_zeros,
)


def assert_close(actual, expected, dtype, text):
    """Equal but for a rounding that went the other way: one step of int8 or of a result."""
    if text not in QUANTIZING:
        assert actual.dtype == expected.dtype == dtype
        info = jnp.finfo(dtype)
        step = np.spacing(np.abs(wide(expected)).astype(np.float32)) * 2.0 ** (23 - info.nmant)
        step = np.maximum(step, float(info.smallest_subnormal))
        assert (np.abs(wide(actual) - wide(expected)) <= step).all()
        assert (wide(actual) == wide(expected)).mean() > 0.99
        return
    np.testing.assert_allclose(actual.scales, expected.scales, rtol=1e-5)
    one, other = wide(actual.values), wide(expected.values)
    step = 1.0 if text.endswith("int8") else np.maximum(np.abs(other) * 2.0**-3, 2.0**-9)
    assert (np.abs(one - other) <= step).all()
    assert (one == other).mean() > 0.99


def check_norm(rows, dtype, text, **keywords):
    keywords |= {"epsilon": EPSILON, "format": parsed(text)}
    stream, result = run(triton.add_rms_norm, *rows.arrays, **keywords)
    assert stream.dtype == dtype
    np.testing.assert_array_equal(wide(stream), wide(rows.stream()))
    assert_result(result, rows.normed(), dtype, text)
    keywords.pop("interpret", None)
    expected_stream, expected = run(reference.add_rms_norm, *rows.arrays, **keywords)
    np.testing.assert_array_equal(wide(stream), wide(expected_stream))
    assert_close(result, expected, dtype, text)


def check_gated(rows, dtype, text, **keywords):
    keywords |= {"dtype": jnp.dtype(dtype), "format": parsed(text)}
    result = run(triton.gated, rows.arrays[0], activation="silu", **keywords)
    assert_result(result, rows.gated(), dtype, text)
    keywords.pop("interpret", None)
    assert_close(
        result, run(reference.gated, rows.arrays[0], activation="silu", **keywords), dtype, text
    )


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("shape", "dtype", "splits", "terms_dtype", "residual", "text"),
    [
        ((5, 300), "bfloat16", 1, "bfloat16", True, None),
        ((2, 3, 512), "float16", 3, "float32", True, None),
        ((1, 2048), "bfloat16", 3, "float32", False, "float8:g128/float8"),
        ((2, 3, 300), "float16", 3, "float32", False, "int8/int8"),
        ((5, 512), "bfloat16", 1, "bfloat16", True, "liquid4:g64/int8"),
        ((5, 384), "float16", 3, "float32", True, "float8:gK/float8"),
    ],
)
def test_add_rms_norm(shape, dtype, splits, terms_dtype, residual, text, rng):
    rows = Rows.random(rng, shape, dtype, splits=splits, residual=residual, terms_dtype=terms_dtype)
    check_norm(rows, dtype, text, interpret=True)


@pytest.mark.parametrize(
    ("shape", "dtype", "splits", "terms_dtype", "text"),
    [
        ((5, 600), "bfloat16", 1, "bfloat16", None),
        ((2, 3, 1024), "float16", 3, "float32", "uint4:g64"),
        ((2, 3, 600), "bfloat16", 3, "float32", "int8/int8"),
        ((5, 256), "float16", 1, "float16", "liquid4:g64/int8"),
        ((1, 768), "bfloat16", 3, "float32", "float8:gK/float8"),
    ],
)
def test_gated_silu(shape, dtype, splits, terms_dtype, text, rng):
    rows = Rows.random(rng, shape, dtype, splits=splits, terms_dtype=terms_dtype)
    check_gated(rows, dtype, text, interpret=True)


def check_quantized(rows, dtype, text, **keywords):
    """Checks the rounding of a single term."""
    x = rows.arrays[0][0]
    keywords |= {"format": parsed(text)}
    result = run(triton.quantize_rows, x, **keywords)
    assert_result(result, wide(x), dtype, text)
    keywords.pop("interpret", None)
    assert_close(result, run(quantize_activations, x, **keywords), dtype, text)


@pytest.mark.parametrize(
    ("shape", "dtype", "text"),
    [
        ((5, 300), "bfloat16", "int8/int8"),
        ((2, 3, 512), "float16", "liquid4:g64/int8"),
        ((5, 384), "bfloat16", "float8:gK/float8"),
    ],
)
def test_quantize_rows(shape, dtype, text, rng):
    rows = Rows.random(rng, shape, dtype, terms_dtype=dtype)
    check_quantized(rows, dtype, text, interpret=True)


@pytest.mark.parametrize("text", ["int8/int8", "float8:gK/float8"])
@pytest.mark.parametrize("peak", [1e-29, 1e-32, 1e-37])
def test_rows_of_nearly_zeros_stay_finite(text, peak, rng):
    """Where the reciprocal of the largest magnitude is no float32."""
    rows = Rows.random(rng, (3, 128), "bfloat16", terms_dtype="bfloat16")
    check_quantized(with_nearly_zeros(rows, peak), "bfloat16", text, interpret=True)


@pytest.mark.parametrize("interpret", [True, pytest.param(False, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("text", ["int8/int8", "float8:gK/float8"])
@pytest.mark.parametrize("culprit", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows_in_the_scale_of_its_row(culprit, text, interpret, rng):
    x = random_array(rng, (3, 128), "bfloat16").at[1, 5].set(culprit)
    found = triton.quantize_rows(x, parsed(text), interpret=interpret)
    assert np.isnan(found.scales[:, 0]).tolist() == [False, True, False]


@pytest.mark.parametrize("interpret", [True, pytest.param(False, marks=pytest.mark.gpu)])
def test_halves_go_to_even_integers(interpret):
    x = jnp.concatenate([jnp.arange(-63.5, 64), jnp.full(127, 127.0)]).astype("bfloat16")[None]
    found = triton.quantize_rows(x, parsed("int8/int8"), interpret=interpret)
    np.testing.assert_array_equal(found.values, np.round(wide(x)))
    np.testing.assert_array_equal(found.values, quantize_activations(x, parsed("int8/int8")).values)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("rows", [1, 2048])
@pytest.mark.parametrize(
    ("text", "stored"), [(None, None), ("int8/int8", "i8"), ("float8:gK/float8", "f8E4M3FN")]
)
def test_lowers_at_the_sizes_of_qwen3_8b(rows, text, stored, lower_for_cuda):
    hidden, inner = 4096, 12288
    for dtype, short, splits in (("bfloat16", "bf16", 1), ("float16", "f16", 4)):
        terms_dtype = "float32" if splits > 1 else dtype
        terms = jax.ShapeDtypeStruct((splits, 1, rows, hidden), terms_dtype)
        residual = jax.ShapeDtypeStruct((1, rows, hidden), dtype)
        weight = jax.ShapeDtypeStruct((hidden,), dtype)
        norm = functools.partial(triton.add_rms_norm, epsilon=1e-6, format=parsed(text))
        for others in ((residual, weight), (None, weight)):
            program = lower_for_cuda(norm, terms, *others)
            assert 'name = "add_rms_norm"' in program
            assert "num_warps = 16" in program
            assert "shrsi" in program  # of the zero that is not known to be one
            assert f"tensor<{rows}x{hidden}x{stored or short}>" in program
        both = jax.ShapeDtypeStruct((splits, 1, rows, 2 * inner), terms_dtype)
        gate = functools.partial(
            triton.gated, activation="silu", dtype=jnp.dtype(dtype), format=parsed(text)
        )
        program = lower_for_cuda(gate, both)
        assert 'name = "gated_silu"' in program
        assert f"tensor<{rows}x{inner}x{stored or short}>" in program
        assert "num_warps = 16" in program
        if text is not None:
            x = jax.ShapeDtypeStruct((rows, hidden), dtype)
            program = lower_for_cuda(
                functools.partial(triton.quantize_rows, format=parsed(text)), x
            )
            assert 'name = "quantize_rows"' in program
            assert f"tensor<{rows}x{hidden}x{stored}>" in program


@pytest.mark.gpu
@pytest.mark.parametrize("text", [None, *QUANTIZING])
@pytest.mark.parametrize(
    ("dtype", "splits", "terms_dtype"),
    [("bfloat16", 1, "bfloat16"), ("float16", 4, "float32")],
)
def test_on_the_gpu(dtype, splits, terms_dtype, text, rng):
    draw = functools.partial(Rows.random, rng, splits=splits, terms_dtype=terms_dtype)
    for count, channels, residual in (
        (1, 4096, True),
        (1, 4096, False),
        (7, 300, True),
        (2048, 4096, True),
    ):
        check_norm(draw((count, channels), dtype, residual=residual), dtype, text)
    for count, channels in ((1, 12288), (7, 300), (2048, 1536)):
        check_gated(draw((count, 2 * channels), dtype), dtype, text)


@pytest.mark.gpu
@pytest.mark.parametrize("text", QUANTIZING)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_quantize_rows_on_the_gpu(dtype, text, rng):
    for shape in ((1, 4096), (7, 300), (2048, 4096)):
        rows = Rows.random(rng, shape, dtype, terms_dtype=dtype)
        check_quantized(rows, dtype, text)
        if dtype == "bfloat16":
            check_quantized(with_nearly_zeros(rows, 1e-37), dtype, text)
