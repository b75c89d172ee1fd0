from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import Routing, route


def choose(scores: np.ndarray, count: int) -> np.ndarray:
    """The largest scores of each row, the first of equal ones first."""
    return np.argsort(-scores, axis=-1, kind="stable")[:, :count]


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_scores_of_the_chosen_are_the_weights(scoring, renormalize, rng):
    logits = rng.standard_normal((20, 12))
    routing = Routing(3, scoring, renormalize, scale=2.5)
    experts, weights = route(jnp.asarray(logits, jnp.float32), routing)
    scores = softmax(logits) if scoring == "softmax" else 1 / (1 + np.exp(-logits))
    expected = choose(scores, 3)
    chosen = np.take_along_axis(scores, expected, -1)
    chosen = chosen / chosen.sum(-1, keepdims=True) if renormalize else chosen
    np.testing.assert_array_equal(experts, expected)
    np.testing.assert_allclose(weights, 2.5 * chosen, rtol=1e-5)
    assert (experts.dtype, weights.dtype) == (jnp.int32, jnp.float32)


def test_the_lowest_number_is_first_among_equals():
    logits = jnp.array([[0, 1, 1, 0, 1], [0, 0, 0, 0, 0], [-1e9, -1e9, 3, -1e9, -1e9]], "bfloat16")
    experts, weights = route(logits, Routing(4))
    np.testing.assert_array_equal(experts, [[1, 2, 4, 0], [0, 1, 2, 3], [2, 0, 1, 3]])
    np.testing.assert_allclose(weights[1], 0.25)


def test_logits_that_a_softmax_rounds_to_equal_scores_keep_their_order():
    experts, _ = route(jnp.array([[-200.0, -190.0, 0.0]]), Routing(2))
    np.testing.assert_array_equal(experts, [[2, 1]])


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_correction_of_scores_chooses_and_does_not_weigh(scoring, rng):
    """One as large as the scores, with which neither logits nor scores alone have the order."""
    logits = rng.standard_normal((20, 8)).astype(np.float32)
    correction = rng.uniform(-0.3, 0.3, 8).astype(np.float32)
    found, weights = route(logits, Routing(3, scoring, renormalize=False), correction)
    scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    if scoring == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    experts = np.argsort(-(scores + correction), -1)[:, :3]
    np.testing.assert_array_equal(found, experts)
    for other in (scores, logits + correction):
        assert (np.argsort(-other, -1)[:, :3] != experts).any()
    np.testing.assert_allclose(weights, np.take_along_axis(scores, experts, -1), 1e-5)


def test_a_bias_is_added_to_logits(rng):
    logits, bias = rng.standard_normal((20, 8)), rng.standard_normal(8)
    logits, bias = (jnp.asarray(x, jnp.bfloat16) for x in (logits, bias))
    found = route(logits, Routing(2), bias=bias)
    sums = logits.astype(jnp.float32) + bias.astype(jnp.float32)[None]
    for one, other in zip(found, route(sums, Routing(2)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("scoring", "group_score"),
    [("softmax", "max"), ("softmax", "top_two"), ("sigmoid", "top_two")],
)
def test_experts_come_out_of_the_best_groups(scoring, group_score, rng):
    logits = rng.standard_normal((50, 12)).astype(np.float32)
    routing = Routing(3, scoring, groups=4, groups_per_token=2, group_score=group_score)
    experts, _ = route(logits, routing)
    scores = softmax(logits) if scoring == "softmax" else 1 / (1 + np.exp(-logits))
    grouped = np.sort(scores.reshape(50, 4, 3), -1)
    best = choose(grouped[..., -1] if group_score == "max" else grouped[..., -2:].sum(-1), 2)
    allowed = np.isin(np.arange(12)[None] // 3, best[0])
    for row in range(50):
        allowed = np.isin(np.arange(12) // 3, best[row])
        expected = choose(np.where(allowed, scores[row], -1)[None], 3)
        np.testing.assert_array_equal(experts[row], expected[0])
    assert (np.asarray(experts) != choose(scores, 3)).any()  # else groups would say nothing


def test_weights_have_a_gradient(rng):
    logits = jnp.asarray(rng.standard_normal((4, 6)), jnp.float32)
    routing = Routing(2, renormalize=False)
    found = jax.grad(lambda logits: route(logits, routing)[1].sum())(logits)
    step = 1e-2 * jnp.asarray(rng.standard_normal(logits.shape), jnp.float32)
    ahead, behind = (route(logits + sign * step, routing)[1].sum() for sign in (0.5, -0.5))
    np.testing.assert_allclose((found * step).sum(), ahead - behind, rtol=0.05, atol=1e-5)


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        (Routing(9), "9 experts per token are more than the 8 that there are"),
        (Routing(2, groups=3, groups_per_token=1), "8 experts can't be divided into 3 groups"),
        (Routing(2, groups=4, groups_per_token=5), "5 groups per token: expected 1 to 4"),
        (Routing(3, groups=4, groups_per_token=1), "3 experts .* more than 1 groups of 2 have"),
        (
            Routing(2, groups=8, groups_per_token=4, group_score="top_two"),
            "groups of 1 expert have no two largest scores",
        ),
    ],
)
def test_routings_that_do_not_fit_the_experts(routing, message):
    with pytest.raises(ValueError, match=f"^route: {message}$"):
        route(jnp.zeros((1, 8)), routing)


def test_arrays_that_do_not_fit():
    with pytest.raises(ValueError, match="route: logits are int32 of shape"):
        route(jnp.zeros((1, 8), jnp.int32), Routing(2))
    with pytest.raises(ValueError, match=r"route: correction is .* expected shape \(8,\)"):
        route(jnp.zeros((1, 8)), Routing(2), jnp.zeros(4))
    with pytest.raises(ValueError, match=r"route: bias is .* expected shape \(8,\)"):
        route(jnp.zeros((1, 8)), Routing(2), bias=jnp.zeros((1, 8)))
