from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import Gate, RouterLogits, Routing, grouped_matmul, quantize
from mpjax.kernels.experts.plans import ExpertsConfig, forced
from mpjax.kernels.experts.routed_mlp import routed_products
from mpjax.kernels.plans.plan import Plan
from tests.pallas_kernels.experts.cases import EXPERTS
from tests.pallas_kernels.experts.test_triton import dense, rounded, stack
from tests.pallas_kernels.oracles import GATES, random_array, relative_error, wide
from tests.sweeps import in_sweep

PAIRS = Plan("triton", ExpertsConfig(8, 32, 1, 2, 2, tiling="pairs"))
GATE, ROUTING = Gate(2.0, 1.5), Routing(2)


def arguments(rng, text: str = "uint4:g32"):
    weight = stack(rng, text, 96, 64)
    weight = weight.astype(jnp.bfloat16) if text == "bfloat16" else weight
    logits, own = (random_array(rng, shape, "float32") for shape in ((2, 3, EXPERTS), (EXPERTS,)))
    bias = random_array(rng, (EXPERTS, 64), "float32")
    x = random_array(rng, (2, 3, 96), "bfloat16")
    return x, weight, RouterLogits(logits, ROUTING, bias=own), GATE, bias


@pytest.mark.parametrize("text", ["uint4:g32", in_sweep("int8/int8"), in_sweep("bfloat16")])
def test_it_is_the_routing_and_the_product(text, rng, interpreted_triton):
    x, weight, logits, gate, bias = arguments(rng, text)
    with forced(PAIRS):
        inner, experts, weights = routed_products(x, weight, logits, gate, bias)
    chosen = logits.route()
    np.testing.assert_array_equal(experts, chosen[0])
    np.testing.assert_allclose(weights, chosen[1], rtol=1e-5)
    given = rounded(x, weight).astype(np.float32), jnp.asarray(dense(weight), jnp.float32)
    whole = grouped_matmul(*given, chosen[0], bias=bias, gate=gate, implementation="reference")
    assert inner.shape == (2, 3, 2, 32)
    assert relative_error(inner, wide(whole)) < GATES["bfloat16"]


@pytest.mark.sweep
def test_it_has_the_derivatives_of_both(rng, interpreted_triton):
    x, weight, logits, gate, bias = arguments(rng)

    def loss(x, numbers, by_kernel):
        routed = dataclasses.replace(logits, logits=numbers)
        if by_kernel:
            inner, _, weights = routed_products(x, weight, routed, gate, bias)
        else:
            experts, weights = routed.route()
            inner = grouped_matmul(
                x, weight, experts, bias=bias, gate=gate, implementation="reference"
            )
        return (inner.astype(jnp.float32) * weights[..., None]).sum()

    grad = jax.grad(loss, (0, 1))
    with forced(PAIRS):
        found = grad(x, logits.logits, True)
    for one, other in zip(found, grad(x, logits.logits, False), strict=True):
        assert relative_error(one, wide(other)) < 0.02
        assert np.abs(one).max() > 0


@pytest.mark.parametrize("what", ["plan", "splits", "routing", "shape", "bias", "permutation"])
def test_calls_of_other_kernels(what, rng, interpreted_triton):
    x, weight, logits, gate, bias = arguments(rng)
    plan = PAIRS
    if what == "plan":
        plan = Plan("triton", dataclasses.replace(PAIRS.config, tiling="counted"))
    elif what == "splits":
        plan = Plan("triton", dataclasses.replace(PAIRS.config, splits=2))
    elif what == "routing":
        logits = dataclasses.replace(logits, routing=Routing(2, "sigmoid"))
    elif what == "shape":
        x = x[..., :64]
    elif what == "bias":
        bias = bias[:, :32]
    else:
        order = jnp.tile(jnp.arange(96, dtype=jnp.int32), (EXPERTS, 1))
        weight = dataclasses.replace(weight, permutation=order)
    with forced(plan):
        assert routed_products(x, weight, logits, gate, bias) is None


def test_without_a_gpu_there_is_none(rng):
    x, weight, logits, gate, bias = arguments(rng)
    with forced(PAIRS):
        assert routed_products(x, weight, logits, gate, bias) is None


@pytest.mark.gpu
@pytest.mark.parametrize("text", ["uint4:g128", "float4:g32", "bfloat16"])
def test_on_the_gpu(text, rng):
    """With the experts of Qwen3-30B-A3B, and with ties among logits."""
    weight = quantize(random_array(rng, (128, 1024, 768), "bfloat16") * jnp.bfloat16(1 / 32), text)
    x = random_array(rng, (2, 1024), "bfloat16")
    logits = jnp.round(random_array(rng, (2, 128), "float32") * 4)
    own = RouterLogits(logits, Routing(8))
    run = jax.jit(lambda *given: routed_products(*given, Gate(), None))
    inner, experts, weights = run(x, weight, own)
    chosen = own.route()
    np.testing.assert_array_equal(experts, chosen[0])
    np.testing.assert_allclose(weights, chosen[1], rtol=1e-5)
    whole = grouped_matmul(
        x.astype(jnp.float32), weight, chosen[0], gate=Gate(), implementation="reference"
    )
    assert relative_error(inner, wide(whole)) < GATES["bfloat16"]
