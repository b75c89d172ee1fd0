from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import (
    ExpertMLP,
    Gate,
    LocalExperts,
    RouterLogits,
    Routing,
    expert_mlp_terms,
    grouped_matmul,
    hadamard,
    quantize,
)
from mpjax.kernels.experts import counting, warpgroups
from mpjax.kernels.experts import mlp as module
from mpjax.kernels.experts.plans import ExpertsConfig, forced
from mpjax.kernels.experts.routed_mlp import routed_products
from mpjax.kernels.plans.plan import Plan
from tests.pallas_kernels.experts.cases import EXPERTS, ROUTINGS, expected
from tests.pallas_kernels.experts.test_triton import dense, rounded, stack
from tests.pallas_kernels.marks import interpreted_here
from tests.pallas_kernels.oracles import GATES, random_array, relative_error, wide
from tests.sweeps import in_sweep

TOKENS, HIDDEN, INNER = 5, 256, 128
PAIRS = ExpertsConfig(8, 32, 1, 2, 2, tiling="pairs")


def arguments(rng: np.random.Generator, text: str, block: int | None = None) -> tuple[Any, ...]:
    mlp = ExpertMLP(
        stack(rng, text, HIDDEN, 2 * INNER),
        stack(rng, text, INNER, 64),
        Gate(2.0, 1.5),
        random_array(rng, (EXPERTS, 2 * INNER), "float32"),
        random_array(rng, (EXPERTS, 64), "float32"),
        block,
    )
    x = random_array(rng, (TOKENS, HIDDEN), "bfloat16")
    return x, mlp, jnp.asarray(ROUTINGS["mixed"]), random_array(rng, (TOKENS, 2), "float32")


def exact(x: Any, mlp: ExpertMLP, experts: Any, weights: Any) -> np.ndarray:
    chosen, biases = np.asarray(experts), (wide(mlp.gate_up_bias), wide(mlp.down_bias))
    rows = rounded(x, mlp.gate_up)
    inner = expected(rows, dense(mlp.gate_up), chosen, None, biases[0], mlp.gate)
    if mlp.hadamard is not None:
        inner = wide(hadamard(jnp.asarray(inner, "float32"), mlp.hadamard))
    inner = rounded(jnp.asarray(inner, x.dtype), mlp.down)
    return expected(inner, dense(mlp.down), chosen, wide(weights), biases[1])


def test_channels_are_mixed_before_down(rng):
    x, mlp, experts, weights = arguments(rng, "int8/int8", 64)
    found = expert_mlp_terms(x, mlp, experts, weights)
    assert relative_error(found.sum(0), exact(x, mlp, experts, weights)) < GATES["bfloat16"]
    plain = dataclasses.replace(mlp, hadamard=None)
    other = expert_mlp_terms(x, plain, experts, weights)
    assert relative_error(other.sum(0), exact(x, mlp, experts, weights)) > 0.1


@interpreted_here
@pytest.mark.parametrize(("text", "block"), [("uint4:g128", 64), in_sweep("int8/int8", None)])
def test_rows_stay_in_the_order_of_experts(text, block, rng, monkeypatch):
    """Between the products, by warpgroups."""
    for kernels, name in ((warpgroups, "of_tiles"), (counting, "counted")):
        launch = functools.partial(getattr(kernels, name), interpret=True)
        monkeypatch.setattr(kernels, name, launch)
    monkeypatch.setattr(module, "why_not", lambda *arguments: None)
    x, mlp, experts, weights = arguments(rng, text, block)
    found = expert_mlp_terms(x, mlp, experts, weights, implementation="mosaic")
    assert (found.shape, found.dtype) == ((1, TOKENS, 64), jnp.float32)
    assert relative_error(found[0], exact(x, mlp, experts, weights)) < GATES["bfloat16"]


def test_parts_of_the_experts_add_up(rng):
    x, mlp, experts, weights = arguments(rng, "uint4:g128")
    count, total = mlp.gate_up.shape[0], 0.0
    for first, size in ((0, 1), (1, count - 1)):
        part = jax.tree.map(lambda array, at=first, size=size: array[at : at + size], mlp)
        own = LocalExperts.of(experts, first, size)
        total += expert_mlp_terms(x, part, own, weights).sum(0)
    assert relative_error(total, exact(x, mlp, experts, weights)) < GATES["bfloat16"]


@pytest.mark.parametrize("plan", [in_sweep(None), Plan("triton", PAIRS)], ids=["routed", "routes"])
def test_logits_in_the_place_of_experts(plan, rng, interpreted_triton):
    """Whether a kernel routes, or the first product does."""
    x, mlp, _, _ = arguments(rng, "uint4:g128")
    logits = RouterLogits(random_array(rng, (TOKENS, EXPERTS), "float32"), Routing(2))
    with forced(plan):
        found = expert_mlp_terms(x, mlp, logits)
    chosen, weights = logits.route()
    assert relative_error(found.sum(0), exact(x, mlp, chosen, weights)) < GATES["bfloat16"]


def layer(x: Any, mlp: ExpertMLP, experts: Any, weights: Any = None) -> jax.Array:
    return expert_mlp_terms(x, mlp, experts, weights)


def structs(tokens: int, text: str = "uint4:g128") -> tuple[Any, ...]:
    plain = (jax.ShapeDtypeStruct((8, *shape), jnp.bfloat16) for shape in ((512, 768), (384, 512)))
    gate_up, down = (jax.eval_shape(lambda w: quantize(w, text), weight) for weight in plain)
    x = jax.ShapeDtypeStruct((tokens, 512), jnp.bfloat16)
    chosen, weights = (jax.ShapeDtypeStruct((tokens, 2), dtype) for dtype in ("int32", "float32"))
    return x, ExpertMLP(gate_up, down), chosen, weights


def test_it_lowers_with_one_order_of_tokens(lower_for_cuda, pretend_gpu):
    many = structs(300)
    lowered = lower_for_cuda(layer, *many)
    assert lowered.count("experts_warpgroups_uint4") >= 2
    assert jax.eval_shape(layer, *many).shape == (1, 300, 512)
    own = (*many[:2], LocalExperts(many[2]), many[3])  # experts of a device of several
    assert lower_for_cuda(layer, *own).count("experts_warpgroups_uint4") >= 2
    few = structs(8)
    assert "experts_warpgroups" not in lower_for_cuda(layer, *few)
    assert jax.eval_shape(layer, *few).shape == (2, 8, 512)


LOGITS = RouterLogits(jnp.zeros((5, 6)), Routing(2))
NO_EXPERTS = {"experts": jnp.zeros((5, 0), int), "routing_weights": jnp.zeros((5, 0))}
ONE_NUMBER = {
    "x": jnp.asarray(1.0),
    "experts": jnp.asarray(0),
    "routing_weights": jnp.asarray(1.0),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp": None}, "expert_mlp_terms: mlp is None: expected a"),
        ({"experts": jnp.zeros((4, 2), int)}, r"x has shape \(5, 256\)"),
        ({"routing_weights": jnp.ones(5)}, "routing_weights has shape"),
        ({"routing_weights": None}, "routing_weights are None and experts ArrayImpl: expected"),
        ({"experts": LOGITS}, "routing_weights are .* and experts RouterLogits: expected"),
        (NO_EXPERTS, r"experts are .* expected integers of shape \[..., k\]"),
        (ONE_NUMBER, r"experts are .* expected integers of shape \[..., k\]"),
    ],
)
def test_arguments_that_do_not_fit(changes, message, rng):
    names = "x", "mlp", "experts", "routing_weights"
    given = dict(zip(names, arguments(rng, "uint4:g128"), strict=True))
    with pytest.raises(ValueError, match=message):
        expert_mlp_terms(**given | changes)


@pytest.mark.gpu
@pytest.mark.usefixtures("wgmma")
@pytest.mark.parametrize(
    "text",
    ["uint4:g128", "int8/int8", "liquid4:g64/int8", "float8:gK/float8", "float4:g32", "bfloat16"],
)
def test_on_the_gpu(text, rng):
    """Against float64; the same bits again."""
    hidden, inner = 1024, 512
    gate_up, down = (
        quantize(random_array(rng, (8, k, n), "bfloat16") * jnp.bfloat16(k**-0.5), text)
        for k, n in ((hidden, 2 * inner), (inner, hidden))
    )
    biases = (random_array(rng, (8, size), "float32") for size in (2 * inner, hidden))
    mlp = ExpertMLP(gate_up, down, Gate(), *biases)
    run = jax.jit(functools.partial(expert_mlp_terms, implementation="mosaic"))
    for tokens in (1, 300, 3000):
        x = random_array(rng, (tokens, hidden), "bfloat16")
        chosen = np.argsort(rng.random((tokens, 8)), -1)[:, :2].astype(np.int32)
        weights = random_array(rng, (tokens, 2), "float32")
        [found] = run(x, mlp, chosen, weights)
        whole = exact(x, mlp, chosen, weights)
        assert relative_error(found, whole) < 2 * GATES["bfloat16"], f"{tokens} tokens"
        np.testing.assert_array_equal(found, run(x, mlp, chosen, weights)[0])


def test_a_static_scale_is_refused_for_experts_whoever_computes_them(rng):
    """Also for the second product, and where the first one chooses experts."""
    stacks = (
        quantize(random_array(rng, (2, k, n), "float32"), "int8/int8")
        for k, n in ((64, 128), (64, 64))
    )
    plain = ExpertMLP(*stacks)
    x, logits = random_array(rng, (1, 64), "float32"), random_array(rng, (1, 2), "float32")
    for name in ("gate_up", "down"):
        static = dataclasses.replace(getattr(plain, name), activation_scale=jnp.ones(1))
        with pytest.raises(ValueError, match="expert_mlp_terms: the weight has an activation_sc"):
            expert_mlp_terms(
                x, dataclasses.replace(plain, **{name: static}), RouterLogits(logits, Routing(1))
            )


PAIRS_PLAN = Plan("triton", ExpertsConfig(8, 32, 1, 2, 2, tiling="pairs"))
GATE, ROUTING = Gate(2.0, 1.5), Routing(2)


def routed_arguments(rng):
    weight = stack(rng, "uint4:g32", 96, 64)
    logits, own = (random_array(rng, shape, "float32") for shape in ((2, 3, EXPERTS), (EXPERTS,)))
    bias = random_array(rng, (EXPERTS, 64), "float32")
    x = random_array(rng, (2, 3, 96), "bfloat16")
    return x, weight, RouterLogits(logits, ROUTING, bias=own), GATE, bias


def test_it_is_the_routing_and_the_product(rng, interpreted_triton):
    x, weight, logits, gate, bias = routed_arguments(rng)
    with forced(PAIRS_PLAN):
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
    x, weight, logits, gate, bias = routed_arguments(rng)

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
    with forced(PAIRS_PLAN):
        found = grad(x, logits.logits, True)
    for one, other in zip(found, grad(x, logits.logits, False), strict=True):
        assert relative_error(one, wide(other)) < 0.02
        assert np.abs(one).max() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("text", ["uint4:g128", "float4:g32", "bfloat16"])
def test_routed_products_on_the_gpu(text, rng):
    """With the experts of Qwen3-30B-A3B, and with ties among logits."""
    weight = quantize(random_array(rng, (128, 1024, 768), "bfloat16") * jnp.bfloat16(1 / 32), text)
    x = random_array(rng, (2, 1024), "bfloat16")
    logits = jnp.round(random_array(rng, (2, 128), "float32") * 4)
    own = RouterLogits(logits, Routing(8))
    run = jax.jit(lambda *given: routed_products(*given, Gate(), None))  # type: ignore[call-arg]
    inner, experts, weights = run(x, weight, own)
    chosen = own.route()
    np.testing.assert_array_equal(experts, chosen[0])
    np.testing.assert_allclose(weights, chosen[1], rtol=1e-5)
    whole = grouped_matmul(
        x.astype(jnp.float32), weight, chosen[0], gate=Gate(), implementation="reference"
    )
    assert relative_error(inner, wide(whole)) < GATES["bfloat16"]


def test_gelu_and_gains_of_experts(rng):
    """The weights of the experts that are chosen, times their gains."""
    x, gate_up, down = (
        random_array(rng, shape, "float32")
        for shape in ((TOKENS, 16), (EXPERTS, 16, 24), (EXPERTS, 12, 8))
    )
    scores = random_array(rng, (TOKENS, EXPERTS), "float32")
    gain = random_array(rng, (EXPERTS,), "float32")
    mlp = ExpertMLP(gate_up, down, Gate(activation="gelu"))
    plain = RouterLogits(scores, Routing(2))
    found = expert_mlp_terms(x, mlp, dataclasses.replace(plain, gain=gain)).sum(0)
    experts, weights = plain.route()
    expected = np.zeros(found.shape)
    for token, (chosen, own) in enumerate(zip(experts.tolist(), weights.tolist(), strict=True)):
        for expert, weight in zip(chosen, own, strict=True):
            inner = np.asarray(x[token]) @ np.asarray(gate_up[expert])
            gated = np.asarray(jax.nn.gelu(inner[:12])) * inner[12:]
            expected[token] += weight * float(gain[expert]) * (gated @ np.asarray(down[expert]))
    np.testing.assert_allclose(found, expected, atol=1e-3 * abs(expected).max())
    with pytest.raises(ValueError, match=r"gain is .*: expected shape \(\d+,\)"):
        dataclasses.replace(plain, gain=gain[:2]).route()
    with pytest.raises(ValueError, match="activation is 'relu': expected silu or gelu"):
        Gate(activation="relu")
    with pytest.raises(ValueError, match="activation is 'gelu': expected no limit"):
        Gate(7.0, activation="gelu")
