from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import Gate, quantize
from mpjax.kernels.experts import reference
from mpjax.kernels.experts.epilogue import Epilogue
from tests.pallas_kernels.experts.cases import EXPERTS, ROUTINGS, expected
from tests.pallas_kernels.oracles import random_array, relative_error, wide

FORMATS = ("uint4:g32", "table4:g32", "float8:g128", "bfloat16")
products = jax.jit(reference.products)


@pytest.mark.parametrize("name", ROUTINGS)
def test_every_routing(name, rng):
    experts = ROUTINGS[name]
    x = random_array(rng, (len(experts), 128), "float32")
    weight = random_array(rng, (EXPERTS, 128, 16), "float32")
    found = products(x, weight, experts, Epilogue())
    assert relative_error(found, expected(wide(x), wide(weight), experts)) < 1e-5


@pytest.mark.parametrize("text", FORMATS)
def test_a_format_is_its_dequantised_weights(text, rng):
    experts = ROUTINGS["mixed"]
    x = random_array(rng, (5, 2, 128), "bfloat16")  # a row for each expert
    weight = quantize(random_array(rng, (EXPERTS, 128, 16), "float32"), text)
    dense = wide(weight if isinstance(weight, jax.Array) else weight.dequantize())
    bias, weights = (random_array(rng, shape, "float32") for shape in ((EXPERTS, 16), (5, 2)))
    arguments = experts, wide(weights), wide(bias), Gate(1.0, 1.5)
    found = products(x, weight, experts, Epilogue(bias, Gate(1.0, 1.5), weights))
    assert relative_error(found.sum(1), expected(wide(x), dense, *arguments)) < 1e-5


def test_8_bit_activations_are_rounded(rng):
    experts, x = ROUTINGS["mixed"], random_array(rng, (5, 128), "float32")
    weight = quantize(random_array(rng, (EXPERTS, 128, 16), "float32"), "int8/int8")
    found = products(x, weight, experts, Epilogue())
    error = relative_error(found, expected(wide(x), wide(weight.dequantize()), experts))
    assert 1e-4 < error < 0.02


def test_gradients_are_those_of_the_dense_weights(rng):
    experts = ROUTINGS["mixed"]
    x = random_array(rng, (5, 64), "float32")
    weight = quantize(random_array(rng, (EXPERTS, 64, 16), "float32"), "uint4:g32")
    bias, weights = (random_array(rng, shape, "float32") for shape in ((EXPERTS, 16), (5, 2)))

    def loss(x, weights, bias, weight):
        return (products(x, weight, experts, Epilogue(bias, Gate(), weights)) ** 2).sum()

    def plain_loss(x, weights, bias, dense):
        rows = jnp.einsum("tc,tkcn->tkn", x, dense[experts]) + bias[experts]
        gate, up = jnp.split(rows, 2, -1)
        return ((jax.nn.silu(gate) * up * weights[..., None]) ** 2).sum()

    found = jax.grad(loss, (0, 1, 2))(x, weights, bias, weight)
    plain = jax.grad(plain_loss, (0, 1, 2))(x, weights, bias, weight.dequantize())
    for one, other in zip(found, plain, strict=True):
        assert relative_error(one, wide(other)) < 1e-4
    assert np.abs(found[0]).max() > 0
