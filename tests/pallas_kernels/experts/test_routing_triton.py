from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import Routing, route
from mpjax.kernels.experts import routing_triton
from tests.sweeps import combinations

LOGITS = np.random.default_rng(0).standard_normal((7, 20)).astype(np.float32)
LOGITS[1] = 0  # ties
LOGITS[2, ::3] = LOGITS[2].max() + 1
LOGITS[3, 4:] = -np.inf  # fewer experts than are chosen
CORRECTION = np.linspace(-1, 1, 20).astype(np.float32)
ROUTINGS = {
    "softmax": Routing(5),
    "as it is": Routing(5, renormalize=False, scale=2.5),
    "sigmoid": Routing(5, "sigmoid"),
    "sigmoid as it is": Routing(5, "sigmoid", renormalize=False),
    "one": Routing(1),
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
    logits = jnp.asarray(LOGITS)
    found = routing_triton.route(logits, correction, bias, ROUTINGS[name], interpret=True)
    require_equal(found, ROUTINGS[name], logits, correction, bias)


def test_weights_have_the_gradient_of_the_reference(interpreted_triton):
    logits, routing = jnp.asarray(LOGITS[:1]), Routing(3, scale=2.0)

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
    logits = jnp.asarray(LOGITS)
    found = route(logits, ROUTINGS[name], CORRECTION, implementation="triton")
    require_equal(found, ROUTINGS[name], logits, jnp.asarray(CORRECTION))
