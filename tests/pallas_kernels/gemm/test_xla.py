from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels.activations import QuantizedActivations
from mpjax.kernels.gemm import xla
from tests.pallas_kernels.gemm.weights import (
    dense,
    exact,
    integer_activations,
    integer_weight,
    random_activations,
    random_weight,
)
from tests.pallas_kernels.oracles import GATES, relative_error

FORMATS = ("int8:gK/int8", "float8:gK/float8")
multiply = jax.jit(xla.matmul, static_argnums=2)


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize(
    ("rows", "channels", "dtype"), [(1, 300, "bfloat16"), (17, 128, "float16"), (3, 1, "bfloat16")]
)
def test_against_float64(text, rows, channels, dtype, rng):
    weight = random_weight(rng, text, channels, 33)
    x = random_activations(rng, weight, rows, dtype)
    product = multiply(x, weight, jnp.dtype(dtype))
    assert product.dtype == dtype
    assert relative_error(product, exact(x) @ dense(weight)) < GATES[dtype]


@pytest.mark.parametrize("text", FORMATS)
def test_exact_values_stay_exact(text, rng):
    weight = integer_weight(rng, text, 300, 33)
    x = integer_activations(rng, weight, 5, "bfloat16")
    product = multiply(x, weight, jnp.dtype(jnp.float32))
    np.testing.assert_array_equal(np.asarray(product), exact(x) @ dense(weight))


def test_int8_sums_are_integers(rng):
    """Sums pass 2**24, above which float32 has no odd numbers, and come back."""
    matrix = rng.integers(115, 128, (16, 65536)).astype(np.int8)  # [N, K]
    values = rng.integers(115, 128, (4, 65536)).astype(np.int8)
    values[:, 32768:] *= -1
    sums = values.astype(np.int64) @ matrix.T.astype(np.int64)
    x = QuantizedActivations(jnp.asarray(values), jnp.ones((4, 1)), "float32")
    product = xla.scaled_dot(x, jnp.asarray(matrix), jnp.ones(16), jnp.dtype(jnp.float32))
    np.testing.assert_array_equal(np.asarray(product), sums)


@pytest.mark.parametrize("text", FORMATS)
def test_scales_meet_their_row_and_channel(text, rng):
    weight = integer_weight(rng, text, 128, 5)
    x = integer_activations(rng, weight, 3, "bfloat16")
    row = 2 * np.asarray(x.scales)[1]
    doubled = dataclasses.replace(x, scales=x.scales.at[1].set(row))
    before, after = (np.asarray(multiply(q, weight, jnp.dtype(jnp.float32))) for q in (x, doubled))
    np.testing.assert_array_equal(after, before * np.array([[1], [2], [1]]))


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


def test_scaling_lowers(lower_for_cuda, monkeypatch, rng):
    monkeypatch.setattr(xla.device, "why_triton_cannot_run", lambda: None)
    weight = random_weight(rng, "float8:gK/float8", 128, 1030)
    x = random_activations(rng, weight, 3, "bfloat16")
    multiply = functools.partial(xla.matmul, out_dtype=jnp.dtype(jnp.bfloat16))
    assert 'name = "scale"' in lower_for_cuda(multiply, x, weight)
