from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gemm import reference
from tests.pallas_kernels.gemm.weights import dense, integer_weight, random_weight
from tests.pallas_kernels.oracles import (
    WEIGHT_FORMATS,
    random_array,
    relative_error,
    wide,
)


@pytest.mark.parametrize("text", WEIGHT_FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_is_the_product_with_the_dequantized_weight(text, dtype, rng):
    weight = random_weight(rng, text, 256, 24)
    x = random_array(rng, (5, 256), dtype)
    product = reference.matmul(x, weight)
    assert product.dtype == x.dtype
    expected = wide(x) @ dense(weight)
    assert relative_error(product, expected) < (1e-6 if dtype == "float32" else 3e-3)


def test_integers_are_exact(rng):
    weight = integer_weight(rng, "uint4:g32", 96, 8)
    x = rng.integers(-8, 9, (4, 96)).astype(np.float32)
    expected = x @ dense(weight)
    np.testing.assert_array_equal(np.asarray(reference.matmul(jnp.asarray(x), weight)), expected)


def test_permuted_rows_meet_their_channels(rng):
    weight = random_weight(rng, "uint8:g32", 64, 8, permuted=True)
    x = random_array(rng, (3, 64), "float32")
    packed = dense(dataclasses.replace(weight, permutation=None))
    expected = np.zeros((3, 8))
    for row, channel in enumerate(np.asarray(weight.permutation)):
        expected += np.outer(wide(x)[:, channel], packed[row])
    assert relative_error(reference.matmul(x, weight), expected) < 1e-6


def test_is_differentiable_in_the_activations(rng):
    weight = random_weight(rng, "uint4:g64", 128, 8)
    x = random_array(rng, (2, 128), "float32")
    gradient = jax.grad(lambda x: reference.matmul(x, weight).sum())(x)
    expected = np.broadcast_to(dense(weight).sum(1), x.shape)
    assert relative_error(gradient, expected) < 1e-5
