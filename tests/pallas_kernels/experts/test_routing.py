"""The choice of experts: by the reference, by the kernel, and inside a product."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import RouterLogits, Routing, route
from mpjax.kernels.experts import routing_triton
from mpjax.kernels.experts.choosing import choose as choose_expert
from mpjax.kernels.experts.choosing import why_not
from mpjax.kernels.launch import Settings, first_program_id, launch, store
from tests.sweeps import combinations


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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"per_token": 0}, "per_token is 0"),
        ({"scoring": "relu"}, "scoring is 'relu': expected softmax or sigmoid or sparsemixer"),
        ({"group_score": "sum"}, "group_score is 'sum': expected max or top_two"),
        ({"scoring": "sparsemixer"}, "scoring is 'sparsemixer', groups None, renormalize True"),
        ({"groups": 2}, "groups is 2 and groups_per_token None: expected both, or neither"),
    ],
)
def test_fields_that_are_wrong(fields, message):
    with pytest.raises(ValueError, match=f"^Routing: {message}"):
        Routing(**{"per_token": 2} | fields)


TIED_LOGITS = np.random.default_rng(0).standard_normal((7, 20)).astype(np.float32)
TIED_LOGITS[1] = 0  # ties
TIED_LOGITS[2, ::3] = TIED_LOGITS[2].max() + 1
TIED_LOGITS[3, 4:] = -np.inf  # fewer experts than are chosen
CORRECTION = np.linspace(-1, 1, 20).astype(np.float32)
ROUTINGS = {
    "softmax": Routing(5),
    "as it is": Routing(5, renormalize=False, scale=2.5),
    "sigmoid": Routing(5, "sigmoid"),
    "sigmoid as it is": Routing(5, "sigmoid", renormalize=False),
    "one": Routing(1),
    "sparsemixer": Routing(5, "sparsemixer", renormalize=False, jitter=0.3),
    "groups": Routing(5, groups=5, groups_per_token=2),
    "pairs of groups": Routing(5, groups=5, groups_per_token=2, group_score="top_two"),
    "sigmoid groups": Routing(
        5, "sigmoid", scale=2.5, groups=4, groups_per_token=3, group_score="top_two"
    ),
}


def require_equal(found, routing, logits, *added):
    experts, weights = route(logits, routing, *added, implementation="reference")
    np.testing.assert_array_equal(found[0], experts)
    np.testing.assert_allclose(found[1], weights, rtol=1e-5)


@pytest.mark.one_of(4)
@combinations(1, name=tuple(ROUTINGS), is_corrected=(False, True))
def test_it_is_the_reference(name, is_corrected):
    """Without a correction of scores and a bias of logits, and with both."""
    correction, bias = (
        jnp.asarray(each) if is_corrected else None for each in (CORRECTION, CORRECTION[::-1])
    )
    if ROUTINGS[name].scoring == "sparsemixer":
        correction = None
    logits = jnp.asarray(TIED_LOGITS)
    found = routing_triton.route(logits, correction, bias, ROUTINGS[name], interpret=True)
    require_equal(found, ROUTINGS[name], logits, correction, bias)


def test_the_kernel_keeps_to_the_best_group():
    """Though the first expert of the next one comes before the second of the best."""
    logits = jnp.zeros((1, 20)).at[0, jnp.array([4, 5, 8])].set(jnp.array([3.0, 1.0, 2.0]))
    routing = Routing(2, groups=5, groups_per_token=1)
    found = routing_triton.route(logits, None, None, routing, interpret=True)
    assert found[0].tolist() == [[4, 5]]
    require_equal(found, routing, logits)


def test_weights_have_the_gradient_of_the_reference(interpreted_triton):
    logits, routing = jnp.asarray(TIED_LOGITS[:1]), Routing(3, scale=2.0)

    def loss(logits, implementation):
        experts, weights = route(logits, routing, implementation=implementation)
        return (weights * (1.0 + experts.astype(jnp.float32))).sum()

    found, expected = (jax.grad(loss)(logits, name) for name in ("triton", "reference"))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert np.abs(found).max() > 0


DEEPSEEK_V3 = Routing(8, "sigmoid", True, 2.5, 8, 4, "top_two")


@pytest.mark.parametrize("routing", [Routing(8), DEEPSEEK_V3])
def test_it_lowers(routing, lower_for_cuda):
    run = functools.partial(routing_triton.route, correction=None, bias=None, routing=routing)
    assert "route" in lower_for_cuda(run, jax.ShapeDtypeStruct((64, 256), jnp.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROUTINGS)
def test_on_the_gpu(name):
    logits, correction = jnp.asarray(TIED_LOGITS), jnp.asarray(CORRECTION)
    added = () if ROUTINGS[name].scoring == "sparsemixer" else (correction,)
    found = route(logits, ROUTINGS[name], *added, implementation="triton")
    require_equal(found, ROUTINGS[name], logits, *added)


def chosen(logits: RouterLogits) -> tuple[jax.Array, jax.Array]:
    """The experts and weights of all tokens, each by a program of its own."""
    shape = len(logits.logits), logits.routing.per_token

    def kernel(logits, experts_ref, weights_ref):
        place = tuple(divmod(first_program_id(), shape[1]))
        found = choose_expert(logits, *place)
        store(experts_ref.at[place], found.expert)
        store(weights_ref.at[place], found.weight())

    return launch(
        kernel,
        logits,
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.float32)],
        grid=(shape[0] * shape[1],),
        settings=Settings("choose"),
        interpret=True,
    )


@pytest.mark.parametrize("routing", [Routing(5), Routing(4, renormalize=False, scale=2.5)])
@pytest.mark.parametrize("bias", [None, CORRECTION])
def test_it_is_the_routing(routing, bias):
    """Among the logits are ties, and fewer finite ones than are chosen."""
    logits = RouterLogits(
        jnp.asarray(TIED_LOGITS), routing, bias=None if bias is None else jnp.asarray(bias)
    )
    found, (experts, weights) = chosen(logits), logits.route()
    np.testing.assert_array_equal(found[0], experts)
    np.testing.assert_allclose(found[1], weights, rtol=1e-5)


def test_experts_exist_whatever_the_logits_are():
    logits = jnp.full((2, 20), jnp.nan).at[1, :10].set(0.0)
    experts, _ = chosen(RouterLogits(logits, Routing(5)))
    assert ((np.asarray(experts) >= 0) & (np.asarray(experts) < 20)).all()


@pytest.mark.parametrize(
    ("routing", "experts", "corrected", "reason"),
    [
        (Routing(8), 128, False, None),
        (Routing(8), 129, False, "129 experts; a product chooses among up to 128"),
        (Routing(8, "sigmoid"), 64, False, "experts are ranked by corrected or sigmoid scores"),
        (Routing(8), 64, True, "experts are ranked by corrected or sigmoid scores"),
        (Routing(8, groups=4, groups_per_token=2), 64, False, "experts come out of groups"),
    ],
)
def test_routings_that_take_a_kernel_of_their_own(routing, experts, corrected, reason):
    found = why_not(routing, experts, corrected=corrected)
    assert found == reason or (found is not None and reason is not None and reason in found)
