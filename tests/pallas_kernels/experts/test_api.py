from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import Gate, grouped_matmul, grouped_matmul_terms, quantize
from mpjax.kernels.experts import api, reference
from mpjax.kernels.experts.epilogue import Epilogue
from mpjax.kernels.gradients import with_gradients_of
from tests.pallas_kernels.experts.cases import EXPERTS, ROUTINGS, expected
from tests.pallas_kernels.oracles import random_array, relative_error, wide

TOKENS = 5
MIXED = ROUTINGS["mixed"]


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    return {
        "x": random_array(rng, (TOKENS, 64), "float32"),
        "weight": random_array(rng, (EXPERTS, 64, 16), "float32"),
        "experts": MIXED,
        "routing_weights": random_array(rng, (TOKENS, 2), "float32"),
        "bias": random_array(rng, (EXPERTS, 16), "float32"),
    }


def test_products_and_their_weighted_sum(arrays):
    values = {name: np.asarray(array) for name, array in arrays.items()}
    whole = expected(
        *(
            np.asarray(array, np.float64) if name != "experts" else array
            for name, array in values.items()
        )
    )
    found = grouped_matmul(**arrays)
    assert found.shape == (TOKENS, 16)
    assert relative_error(found, whole) < 1e-5
    terms = grouped_matmul_terms(**arrays)
    assert (terms.shape, terms.dtype) == ((2, TOKENS, 16), jnp.float32)
    np.testing.assert_array_equal(terms.sum(0), found)
    each = grouped_matmul(arrays["x"], arrays["weight"], MIXED, bias=arrays["bias"])
    assert each.shape == (TOKENS, 2, 16)
    summed = (wide(each) * wide(arrays["routing_weights"])[..., None]).sum(1)
    assert relative_error(summed, whole) < 1e-5


def test_leading_axes_and_dtypes(arrays):
    x = arrays["x"].reshape(1, TOKENS, 64).astype("bfloat16")
    found = grouped_matmul(x, arrays["weight"], MIXED[None], gate=Gate())
    assert (found.shape, found.dtype) == ((1, TOKENS, 2, 8), jnp.bfloat16)
    own = jnp.repeat(x[:, :, None], 2, 2)  # a row for each expert
    again = grouped_matmul(own, arrays["weight"], MIXED[None], gate=Gate())
    np.testing.assert_array_equal(again, found)
    none = grouped_matmul(x[:, :0], arrays["weight"], MIXED[None, :0])
    assert none.shape == (1, 0, 2, 16)


def test_gradients_reach_x_the_weights_and_the_bias(arrays):
    packed = quantize(arrays["weight"], "uint4:g32")

    def loss(x, routing_weights, bias):
        return grouped_matmul(x, packed, MIXED, routing_weights=routing_weights, bias=bias).sum()

    given = arrays["x"], arrays["routing_weights"], arrays["bias"]
    gradients = jax.grad(loss, (0, 1, 2))(*given)
    dense = wide(packed.dequantize())[MIXED].sum(-1)  # [tokens, k, K]
    by_weight = wide(arrays["routing_weights"])[..., None]
    assert relative_error(gradients[0], (dense * by_weight).sum(1)) < 1e-5
    bias = wide(arrays["bias"])[MIXED].sum(-1)
    assert relative_error(gradients[1], (dense * wide(given[0])[:, None]).sum(-1) + bias) < 1e-4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": jnp.ones((64, 16))}, r"the weight has shape \(64, 16\): expected a stack"),
        ({"weight": jnp.ones((6, 64, 0))}, r"the weight has shape \(6, 64, 0\): .* one of each"),
        ({"experts": jnp.ones((TOKENS, 2))}, "experts are float32 .* expected integers"),
        ({"experts": jnp.ones((TOKENS, 0), int)}, "experts are .* with one expert or more"),
        ({"experts": jnp.full((TOKENS, 2), 6)}, "experts must be from 0 to 5"),
        ({"x": jnp.ones((TOKENS, 32))}, r"x has shape \(5, 32\): expected \(5, 64\) or \(5, 2, 64"),
        ({"bias": jnp.ones(16)}, r"bias has shape \(16,\): expected \(6, 16\)"),
        ({"routing_weights": jnp.ones(5)}, r"routing_weights has shape \(5,\): expected \(5, 2\)"),
        ({"x": jnp.ones((TOKENS, 64), jnp.int32)}, "x has the dtype int32: expected floating"),
        ({"gate": "silu"}, "gate is 'silu': expected a Gate"),
        ({"weight": jnp.ones((EXPERTS, 64, 15)), "bias": None, "gate": Gate()}, "15 outputs have"),
        ({"implementation": "cuda"}, "unknown implementation 'cuda'"),
    ],
)
def test_arguments_that_do_not_fit(arrays, changes, message):
    with pytest.raises(ValueError, match=f"^grouped_matmul: {message}"):
        grouped_matmul(**arrays | changes)


def test_terms_have_the_gradient_of_their_sum(rng):
    """However many there are; also with codes, which have none."""
    experts = jnp.asarray(ROUTINGS["mixed"])
    weight = quantize(random_array(rng, (EXPERTS, 64, 8), "float32"), "table4:g32")
    x, weights = random_array(rng, (5, 64), "float32"), random_array(rng, (5, 2), "float32")

    def split(x, weight, experts, epilogue):
        whole = reference.products(x, weight, experts, epilogue).sum(1)
        return jnp.stack([0.25 * whole, 0.5 * whole, 0.25 * whole])

    def loss(x, weights, table, run):
        packed = dataclasses.replace(weight, table=table)
        found = run(x, packed, experts, Epilogue(None, None, weights))
        return (found.sum(0) ** 2).sum()

    def joined(*rest):
        return with_gradients_of(api._sums, split, *rest)

    def plain(x, weight, experts, epilogue):
        return jnp.moveaxis(reference.products(x, weight, experts, epilogue), 1, 0)

    given = x, weights, weight.table
    found = jax.grad(loss, (0, 1, 2))(
        *given, lambda *rest: with_gradients_of(api._sums, split, *rest)
    )
    for one, other in zip(found, jax.grad(loss, (0, 1, 2))(*given, plain), strict=True):
        assert relative_error(one, wide(other)) < 1e-5
        assert np.abs(one).max() > 0


def test_the_kernel_has_the_gradients_of_the_reference(interpreted_triton, rng):
    weight = quantize(random_array(rng, (EXPERTS, 64, 64), "float32") / 8, "uint4:g32")
    down = quantize(random_array(rng, (EXPERTS, 32, 64), "float32") / 8, "uint4:g32")
    x, weights = random_array(rng, (5, 64), "bfloat16"), random_array(rng, (5, 2), "float32")

    def loss(x, weights, implementation):
        chosen = ROUTINGS["mixed"]
        gated = grouped_matmul(x, weight, chosen, gate=Gate(), implementation=implementation)
        terms = grouped_matmul_terms(gated, down, chosen, weights, implementation=implementation)
        return (terms.sum(0) ** 2).sum()

    grad = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
    for one, other in zip(grad(x, weights, "triton"), grad(x, weights, "reference"), strict=True):
        assert relative_error(one, wide(other)) < 0.02
