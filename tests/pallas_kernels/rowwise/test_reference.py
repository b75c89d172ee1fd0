from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels.rowwise import reference
from tests.pallas_kernels.oracles import random_array, relative_error, wide
from tests.pallas_kernels.rowwise.rows import (
    EPSILON,
    Rows,
    assert_result,
    parsed,
    run,
)

norm = functools.partial(run, reference.add_rms_norm, epsilon=EPSILON)
gate = functools.partial(run, reference.gated, activation="silu")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rms_norm(dtype, rng):
    x, weight = random_array(rng, (2, 5, 3, 64), dtype), random_array(rng, (64,), dtype)
    normed = reference.rms_norm(x, weight, EPSILON).astype(dtype)
    assert normed.dtype == dtype
    expected = wide(x) / np.sqrt((wide(x) ** 2).mean(-1, keepdims=True) + EPSILON) * wide(weight)
    assert relative_error(normed, expected) < {"float32": 1e-6, "float16": 1e-3}[dtype]
    np.testing.assert_array_equal(reference.rms_norm(0 * x, weight, EPSILON), 0)


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("dtype", "splits", "terms_dtype", "residual", "text"),
    [
        ("bfloat16", 1, "bfloat16", True, None),
        ("float16", 3, "float32", True, None),
        ("float32", 3, "float32", False, "uint4:g64"),
        ("bfloat16", 3, "float32", False, "float8:g128/float8"),
        ("bfloat16", 3, "float32", True, "int8/int8"),
        ("float32", 1, "float32", False, "liquid4:g64/int8"),
        ("float16", 1, "float16", True, "float8:gK/float8"),
    ],
)
def test_add_rms_norm(dtype, splits, terms_dtype, residual, text, rng):
    rows = Rows.random(
        rng, (2, 3, 300), dtype, splits=splits, residual=residual, terms_dtype=terms_dtype
    )
    stream, result = norm(*rows.arrays, format=parsed(text))
    assert stream.dtype == dtype
    np.testing.assert_array_equal(wide(stream), wide(rows.stream()))
    assert_result(result, rows.normed(), dtype, text)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_norm_is_that_of_the_stream_as_stored(dtype, rng):
    """On a GPU, XLA would remove a cast there and back; what rounds has to be in the program."""
    terms = random_array(rng, (3, 4, 64), "float32")
    residual, weight = random_array(rng, (4, 64), dtype), random_array(rng, (64,), dtype)
    add = functools.partial(reference.add_rms_norm, epsilon=EPSILON, format=parsed("int8/int8"))
    lowered = jax.jit(add).lower(terms, residual, weight)
    assert "stablehlo.reduce_precision" in lowered.as_text()
    stream, result = lowered.compile()(terms, residual, weight)
    expected = reference.rms_norm(stream, weight, EPSILON)
    peaks = np.abs(expected).max(-1, keepdims=True)
    np.testing.assert_allclose(result.scales, peaks / 127, rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "splits", "terms_dtype", "text"),
    [
        ("bfloat16", 1, "bfloat16", None),
        ("float16", 3, "float32", "float8:g128/float8"),
        ("float32", 3, "float32", None),
        ("float32", 1, "float32", "int8/int8"),
        ("bfloat16", 3, "float32", "float8:gK/float8"),
        ("float16", 1, "float16", "liquid4:g64/int8"),
    ],
)
def test_gated_silu(dtype, splits, terms_dtype, text, rng):
    rows = Rows.random(rng, (2, 3, 600), dtype, splits=splits, terms_dtype=terms_dtype)
    result = gate(rows.arrays[0], dtype=jnp.dtype(dtype), format=parsed(text))
    assert_result(result, rows.gated(), dtype, text)


@pytest.mark.parametrize("residual", [False, True])
def test_gradients_of_add_rms_norm(residual, rng):
    rows = Rows.random(rng, (2, 3, 40), "float32", splits=3, residual=residual)
    of_stream, of_normed = random_array(rng, (2, 2, 3, 40), "float32")
    function = functools.partial(reference.add_rms_norm, epsilon=EPSILON)
    of_terms, of_residual, of_weight = run(
        lambda *arrays: jax.vjp(function, *arrays)[1]((of_stream, of_normed)), *rows.arrays
    )
    expected, expected_of_weight = rows.norm_gradients(wide(of_stream), wide(of_normed))
    for gradient in (*of_terms, of_residual)[: 3 + residual]:
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-4)
    assert (of_residual is None) == (not residual)
    np.testing.assert_allclose(of_weight, expected_of_weight, rtol=1e-4, atol=1e-4)
