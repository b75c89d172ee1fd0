from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import LocalExperts, grouped_matmul, grouped_matmul_terms, quantize
from mpjax.kernels.experts import api
from mpjax.kernels.experts.plans import ExpertsConfig, forced
from mpjax.kernels.plans.plan import Plan
from tests.pallas_kernels.experts.cases import EXPERTS, ROUTINGS, expected
from tests.pallas_kernels.oracles import GATES, random_array, relative_error, wide

HALF = EXPERTS // 2
MIXED = ROUTINGS["mixed"]


def test_numbers_are_places_in_the_stack():
    found = LocalExperts.of(MIXED, 3, 2)
    np.testing.assert_array_equal(found.numbers, [[-1, 0], [-1, -1], [0, -1], [-1, -1], [-1, 0]])
    with pytest.raises(ValueError, match="LocalExperts: count is 0: expected"):
        LocalExperts.of(MIXED, 3, 0)
    with pytest.raises(ValueError, match="LocalExperts: total is 1: expected 2 or more"):
        LocalExperts.of(MIXED, 3, 2, 1)
    with pytest.raises(ValueError, match="LocalExperts: total is 0: expected 1 or more"):
        LocalExperts(MIXED, 0)


def test_plans_know_all_experts(arrays, monkeypatch):
    asked = []
    monkeypatch.setattr(api, "_default", lambda problem, *_: asked.append(problem) or "reference")
    part = jax.tree.map(lambda array: array[:HALF], arrays["weight"])
    for total in (EXPERTS, None):
        grouped_matmul(arrays["x"], part, LocalExperts.of(MIXED, 0, HALF, total))
    assert [(each.experts, each.held) for each in asked] == [(EXPERTS, HALF), (HALF, HALF)]


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    return {
        "x": random_array(rng, (5, 256), "float32"),
        "weight": quantize(random_array(rng, (EXPERTS, 256, 32), "float32"), "uint4:g32"),
        "routing_weights": random_array(rng, (5, 2), "float32"),
        "bias": random_array(rng, (EXPERTS, 32), "float32"),
    }


def parts(arrays, multiply, dtype="float32"):
    """Each half of the experts' sums."""
    for first in (0, HALF):
        mine = slice(first, first + HALF)
        yield multiply(
            arrays["x"].astype(dtype),
            jax.tree.map(lambda array, mine=mine: array[mine], arrays["weight"]),
            LocalExperts.of(MIXED, first, HALF),
            routing_weights=arrays["routing_weights"],
            bias=arrays["bias"][mine],
        )


def whole(arrays):
    values = wide(arrays["x"]), wide(arrays["weight"].dequantize()), MIXED
    return expected(*values, wide(arrays["routing_weights"]), wide(arrays["bias"]))


def test_halves_of_the_experts_add_up(arrays):
    assert relative_error(sum(parts(arrays, grouped_matmul)), whole(arrays)) < 1e-5


@pytest.mark.parametrize("tiling", ["pairs", "counted", "sorted"])
def test_the_kernel_leaves_other_experts_out(arrays, tiling, interpreted_triton):
    config = ExpertsConfig(1 if tiling == "pairs" else 16, 32, 2, 2, 2, tiling=tiling)
    with forced(Plan("triton", config)):
        terms = list(parts(arrays, jax.jit(grouped_matmul_terms), "bfloat16"))
    assert terms[0].shape == (4, 5, 32)
    total = sum(each.sum(0) for each in terms)
    assert relative_error(total, whole(arrays)) < GATES["bfloat16"]
    is_others = LocalExperts.of(MIXED, 0, HALF).numbers < 0  # [tokens, k]
    others = terms[0].reshape(2, 2, 5, 32)[:, is_others.T]
    assert others.size > 0
    np.testing.assert_array_equal(others, 0.0)


def test_derivatives_are_those_of_the_own_experts(arrays):
    def loss(bias, routing_weights):
        given = {**arrays, "bias": bias, "routing_weights": routing_weights}
        return next(parts(given, grouped_matmul)).sum()

    bias, weights = jax.grad(loss, (0, 1))(arrays["bias"], arrays["routing_weights"])
    np.testing.assert_array_equal(bias[HALF:], 0.0)
    np.testing.assert_array_equal(np.asarray(weights)[MIXED >= HALF], 0.0)
    by_expert = [wide(arrays["routing_weights"])[expert == MIXED].sum() for expert in range(HALF)]
    assert relative_error(bias[:HALF, 0], np.array(by_expert)) < 1e-5


def test_places_beyond_the_stack_are_refused(arrays):
    given = arrays["x"], arrays["weight"], LocalExperts(jnp.full((5, 2), EXPERTS))
    with pytest.raises(ValueError, match="experts must be from 0 to 5"):
        grouped_matmul(*given)
