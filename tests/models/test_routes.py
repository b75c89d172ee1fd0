"""Choices of routers that are returned, and replayed in a forward pass."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax.kernels import KVFormat
from mpjax.models.state import WHOLE
from tests.models.small import small_mixture, small_model

MODEL = small_mixture(shared=False)
TOKENS = np.random.default_rng(0).integers(1, 50, (2, 9)).astype(np.int32)


def plain(experts, x, chosen):
    """Σ w · down(silu(gate) · up), with w the softmax over the chosen experts' logits."""
    router, stack = experts.router.get_value(), experts.experts
    logits = jnp.take_along_axis(x @ router.T, chosen, -1)
    weights = jax.nn.softmax(logits, -1)
    gate_up, down = (it.kernel.get_value() for it in (stack.gate_up, stack.down))
    gate, up = jnp.split(jnp.einsum("bth,btkhi->btki", x, gate_up[chosen]), 2, -1)
    inner = jax.nn.silu(gate) * up
    return jnp.einsum("btki,btkih,btk->bth", inner, down[chosen], weights)


def test_given_experts_are_weighted_by_their_own_logits():
    """Values, and derivatives with respect to the input and all parameters, router included."""
    experts = MODEL.layers[0].mlp
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((2, 3, 64)), jnp.float32)
    chosen = jnp.asarray([[[3, 0], [1, 2], [0, 1]], [[2, 3], [0, 2], [3, 1]]], jnp.int32)
    graph, state = nnx.split(experts)
    context = dataclasses.replace(WHOLE, routes=chosen)

    def replayed(state, x):
        return jnp.sin(nnx.merge(graph, state).terms(x, context).sum(0)).sum()

    def expected(state, x):
        return jnp.sin(plain(nnx.merge(graph, state), x, chosen)).sum()

    with jax.default_matmul_precision("highest"):
        found, wanted = (
            jax.jit(jax.value_and_grad(run, (0, 1)))(state, x) for run in (replayed, expected)
        )
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-3, rtol=1e-3)
    assert np.asarray(found[1][0]["router"].get_value()).any()


def test_a_trainer_replays_what_a_sampler_chose():
    drawn = mpjax.generate_tokens(
        *(MODEL, TOKENS[:, :4], np.array([4, 3])),
        max_new_tokens=5,
        sampling={"stop_ids": ()},
        capture={"router": [0]},
    )
    routes = drawn.captured["router"]
    text = np.zeros((2, 9), np.int32)
    for row, length in enumerate((4, 3)):
        text[row, : length + 5] = [*TOKENS[row, :length], *np.asarray(drawn.tokens[row])]
    lengths = np.array([9, 8])
    own = mpjax.token_logprobs(MODEL, text, lengths)
    found = mpjax.token_logprobs(MODEL, text, lengths, routes=routes)
    np.testing.assert_allclose(found, own, atol=1e-4)
    others = {0: (np.asarray(routes[0]) + 1) % 4}
    assert np.abs(mpjax.token_logprobs(MODEL, text, lengths, routes=others) - own).max() > 0.05


def test_an_engine_returns_routes_of_its_requests():
    """Routes of all tokens but the last, prefilled in chunks and after a shared prefix."""
    lm = mpjax.LanguageModel(MODEL, None, KVFormat(), Path(), 16)
    prompts = [[*range(1, 25), 30], [*range(1, 25), 31, 32]]
    with mpjax.Engine(lm, slots=2, max_tokens=64, chunk_tokens=16, cache_memory=1 << 24) as engine:
        options = {"sampling": {"stop_ids": ()}, "max_new_tokens": 6, "capture": {"router": [0]}}
        handles = [engine.submit(prompt, **options).result() for prompt in prompts]
    for prompt, handle in zip(prompts, handles, strict=True):
        text = np.array([[*prompt, *handle.tokens]])
        routes = {layer: found[None] for layer, found in handle.captured["router"].items()}
        assert routes[0].shape == (1, text.shape[1] - 1, 2)
        found = mpjax.token_logprobs(MODEL, text, routes=routes)
        np.testing.assert_allclose(found[0, len(prompt) - 1 :], handle.logprobs, atol=1e-4)
        [seen] = MODEL.inspect(text, capture={"router": [0]})[1]["router"].values()
        np.testing.assert_array_equal(routes[0], seen[:, :-1])


def test_routes_that_do_not_fit_are_named():
    right = np.zeros((2, 9, 2), np.int32)
    for routes, message in (
        ([right], "routes is .*by layer"),
        ({1: right}, "routes has 1: expected layers with experts"),
        ({0: right[:, :, :1]}, "routes of layer 0 are .*expected integers of shape"),
        ({0: right[:, :7]}, "routes of layer 0 are .*\\(2, 8, 2\\)"),
        ({0: right.astype(float)}, "routes of layer 0 are .*expected integers"),
        ({0: right + 4}, "routes of layer 0 must be from 0 to 3"),
    ):
        with pytest.raises(ValueError, match=message):
            mpjax.token_logprobs(MODEL, TOKENS, routes=routes)
    with pytest.raises(ValueError, match="routes has 0: expected layers with experts"):
        mpjax.token_logprobs(small_model(), TOKENS, routes={0: right})
