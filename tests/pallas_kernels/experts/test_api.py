"""The public products of experts, and their reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import Gate, LocalExperts, grouped_matmul, grouped_matmul_terms, quantize
from mpjax.kernels.experts import reference
from mpjax.kernels.experts.epilogue import Epilogue
from mpjax.kernels.experts.plans import ExpertsConfig, forced
from mpjax.kernels.plans.plan import Plan
from tests.pallas_kernels.experts.cases import EXPERTS, ROUTINGS, expected
from tests.pallas_kernels.oracles import GATES, random_array, relative_error, wide

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


HALF = EXPERTS // 2


def test_numbers_are_places_in_the_stack():
    found = LocalExperts.of(MIXED, 3, 2)
    np.testing.assert_array_equal(found.numbers, [[-1, 0], [-1, -1], [0, -1], [-1, -1], [-1, 0]])
    with pytest.raises(ValueError, match="LocalExperts: count is 0: expected"):
        LocalExperts.of(MIXED, 3, 0)
    with pytest.raises(ValueError, match="LocalExperts: total is 1: expected 2 or more"):
        LocalExperts.of(MIXED, 3, 2, 1)
    with pytest.raises(ValueError, match="LocalExperts: total is 0: expected 1 or more"):
        LocalExperts(MIXED, 0)


@pytest.fixture(scope="module")
def packed_arrays():
    rng = np.random.default_rng(0)
    return {
        "x": random_array(rng, (5, 256), "float32"),
        "weight": quantize(random_array(rng, (EXPERTS, 256, 32), "float32"), "uint4:g32"),
        "routing_weights": random_array(rng, (5, 2), "float32"),
        "bias": random_array(rng, (EXPERTS, 32), "float32"),
    }


def parts(packed_arrays, multiply, dtype="float32"):
    """Each half of the experts' sums."""
    for first in (0, HALF):
        mine = slice(first, first + HALF)
        yield multiply(
            packed_arrays["x"].astype(dtype),
            jax.tree.map(lambda array, mine=mine: array[mine], packed_arrays["weight"]),
            LocalExperts.of(MIXED, first, HALF),
            routing_weights=packed_arrays["routing_weights"],
            bias=packed_arrays["bias"][mine],
        )


def whole(packed_arrays):
    values = (
        wide(packed_arrays["x"]),
        wide(packed_arrays["weight"].dequantize()),
        MIXED,
    )
    return expected(*values, wide(packed_arrays["routing_weights"]), wide(packed_arrays["bias"]))


def test_halves_of_the_experts_add_up(packed_arrays):
    assert relative_error(sum(parts(packed_arrays, grouped_matmul)), whole(packed_arrays)) < 1e-5


@pytest.mark.parametrize("tiling", ["pairs", "counted", "sorted"])
def test_the_kernel_leaves_other_experts_out(packed_arrays, tiling, interpreted_triton):
    config = ExpertsConfig(1 if tiling == "pairs" else 16, 32, 2, 2, 2, tiling=tiling)
    with forced(Plan("triton", config)):
        terms = list(parts(packed_arrays, jax.jit(grouped_matmul_terms), "bfloat16"))
    assert terms[0].shape == (4, 5, 32)
    total = sum(each.sum(0) for each in terms)
    assert relative_error(total, whole(packed_arrays)) < GATES["bfloat16"]
    is_others = LocalExperts.of(MIXED, 0, HALF).numbers < 0  # [tokens, k]
    others = terms[0].reshape(2, 2, 5, 32)[:, is_others.T]
    assert others.size > 0
    np.testing.assert_array_equal(others, 0.0)


def test_derivatives_are_those_of_the_own_experts(packed_arrays):
    def loss(bias, routing_weights):
        given = {**packed_arrays, "bias": bias, "routing_weights": routing_weights}
        return next(parts(given, grouped_matmul)).sum()

    bias, weights = jax.grad(loss, (0, 1))(packed_arrays["bias"], packed_arrays["routing_weights"])
    np.testing.assert_array_equal(bias[HALF:], 0.0)
    np.testing.assert_array_equal(np.asarray(weights)[MIXED >= HALF], 0.0)
    by_expert = [
        wide(packed_arrays["routing_weights"])[expert == MIXED].sum() for expert in range(HALF)
    ]
    assert relative_error(bias[:HALF, 0], np.array(by_expert)) < 1e-5


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
