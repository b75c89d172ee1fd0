from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels.gemm import reference
from tests.pallas_kernels.gemm.weights import (
    ALL_FORMATS,
    dense,
    exact,
    integer_activations,
    integer_weight,
    random_activations,
    random_weight,
)
from tests.pallas_kernels.oracles import random_array, relative_error, wide
from tests.sweeps import in_sweep

CUT = ("float8:g128", "float8:g128/float8")  # formats whose last group may be
multiply = jax.jit(reference.matmul, static_argnums=2)


# The first format of each kind of codes and of activations.
ONE_OF_EACH = tuple({re.sub(r":\w+", "", text): text for text in reversed(ALL_FORMATS)}.values())
each_kind = pytest.mark.parametrize(
    "text", [text if text in ONE_OF_EACH else in_sweep(text) for text in ALL_FORMATS]
)


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
    product = multiply(x, weight, jnp.dtype(jnp.float32))
    assert relative_error(product, exact(x) @ dense(weight)) < 1e-6


@each_kind
def test_products_are_rounded_once(text, rng):
    weight = random_weight(rng, text, 256, 8)
    x = random_activations(rng, weight, 4, "bfloat16")
    product = multiply(x, weight, jnp.dtype(jnp.bfloat16))
    rounded = multiply(x, weight, jnp.dtype(jnp.float32)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(product), np.asarray(rounded))


@each_kind
def test_integers_are_exact(text, rng):
    weight = integer_weight(rng, text, 256, 8)
    x = integer_activations(rng, weight, 4, "bfloat16")
    product = multiply(x, weight, jnp.dtype(jnp.float32))
    np.testing.assert_array_equal(np.asarray(product), exact(x) @ dense(weight))


def test_permuted_rows_meet_their_channels(rng):
    weight = random_weight(rng, "uint8:g32", 64, 8, permuted=True)
    permutation = np.asarray(weight.permutation)
    x = random_array(rng, (3, 64), "float32")
    expected = wide(x) @ dense(weight)
    assert relative_error(reference.matmul(x, weight, x.dtype), expected) < 1e-6
    shuffled = x[:, permutation]
    assert relative_error(reference.matmul(shuffled, weight, x.dtype), expected) > 0.1


def test_is_differentiable_in_the_activations(rng):
    weight = random_weight(rng, "uint4:g64", 128, 8)
    x = random_array(rng, (2, 128), "float32")
    gradient = jax.grad(lambda x: reference.matmul(x, weight, x.dtype).sum())(x)
    expected = np.broadcast_to(dense(weight).sum(1), x.shape)
    assert relative_error(gradient, expected) < 1e-5
