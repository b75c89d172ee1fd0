from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax.rollouts import logprobs
from tests.mpjax.engine.conftest import make_engine

# Of the mean |difference| between sampler and trainer, by the dtype of activations.
BOUNDS, EXACT = {"bfloat16": 1e-2, "float16": 2e-3}, 1e-5


@pytest.fixture(scope="module", params=BOUNDS)
def bundled(request):
    path = mpjax.bundled_model()
    return mpjax.load(path, precision="W4A16KV16", dtype=request.param, progress=False)


@pytest.fixture(scope="module")
def bound(bundled):
    return BOUNDS[bundled.config.dtype]


@pytest.fixture(scope="module")
def drawn(bundled):
    """Texts of a sampler, padded with their prompts, their lengths and log-probabilities."""
    prompts = ["def mean(values):", "class Stack:", "import os\n"]
    sampling, seeds = {"temperature": 1.0, "stop_ids": ()}, [1, 2, 3]
    found = mpjax.generate(bundled, prompts, max_new_tokens=24, sampling=sampling, seeds=seeds)
    ids = [
        [*bundled.tokenizer.encode(prompt), *own]
        for prompt, own in zip(prompts, found.tokens, strict=True)
    ]
    lengths = np.array([len(row) for row in ids])
    tokens, given = np.zeros((2, 3, lengths.max())), np.zeros((3, lengths.max() - 1))
    for row, (own, new) in enumerate(zip(ids, found.logprobs, strict=True)):
        tokens[0, row, : len(own)] = own
        tokens[1, row, len(own) - 24 : len(own)] = 1
        given[row, len(own) - 25 : len(own) - 1] = new
    return tokens[0].astype(np.int32), lengths, given, tokens[1, :, 1:].astype(bool)


def test_the_trainer_has_the_sampler_s_numbers(bundled, bound, drawn):
    tokens, lengths, given, is_new = drawn
    found = jax.jit(mpjax.token_logprobs)(bundled.for_device, tokens, lengths)
    difference = mpjax.mismatch(given, found, is_new)
    assert difference.tokens == 72
    assert 0 <= difference.mean < bound
    assert difference.kl < 1e-3
    assert difference.effective > 0.99
    assert "72 tokens: mean" in str(difference)
    is_padding = np.arange(1, tokens.shape[1])[None] >= lengths[:, None]
    assert not np.asarray(found)[is_padding].any()


def test_in_float32_the_numbers_are_equal(tiny):
    prompt, new = [5, 6, 7, 8, 9], 12
    with make_engine(tiny) as engine:
        options = {"sampling": {"temperature": 1.0, "stop_ids": ()}, "max_new_tokens": new}
        handle = engine.submit(prompt, seed=3, **options).result()
    found = mpjax.token_logprobs(tiny.model, [prompt + handle.tokens])[0, -new:]
    assert mpjax.mismatch(handle.logprobs, found).mean < EXACT


def test_chunks_change_nothing_but_rounding(bundled, bound, drawn, monkeypatch):
    tokens = drawn[0]
    expected = jax.nn.log_softmax(bundled.model(tokens)[:, :-1])
    expected = np.take_along_axis(np.asarray(expected), tokens[:, 1:, None], -1)[..., 0]
    monkeypatch.setattr(logprobs, "HEAD_VALUES", 7 * bundled.config.vocab_size)
    found = np.asarray(mpjax.token_logprobs(bundled.model, tokens))
    np.testing.assert_allclose(found, expected, atol=5 * bound)
    assert abs(found - expected).mean() < bound / 4
    warm = mpjax.token_logprobs(bundled.model, tokens, temperature=2.0)
    wide = np.asarray(jax.nn.log_softmax(bundled.model(tokens)[:, :-1] / 2))
    wide = np.take_along_axis(wide, tokens[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(np.asarray(warm), wide, atol=5 * bound)


def test_gradients_reach_what_can_be_trained(tiny, monkeypatch):
    """They are those of the plain formula, also in chunks."""
    tokens, lengths = jnp.asarray([[5, 6, 7, 8], [9, 10, 0, 0]]), jnp.asarray([4, 2])
    monkeypatch.setattr(logprobs, "HEAD_VALUES", 2 * 2048)
    graph, parameters, rest = nnx.split(mpjax.lora(tiny, 4).model, mpjax.trainable, ...)

    def loss(parameters, plain):
        model = nnx.merge(graph, parameters, rest)
        if not plain:
            return mpjax.token_logprobs(model, tokens, lengths).sum()
        logits = jax.nn.log_softmax(model(tokens)[:, :-1])
        own = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        return own[0].sum() + own[1, 0]

    found, expected = (jax.jit(jax.grad(loss), static_argnums=1)(parameters, it) for it in (0, 1))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4, rtol=1e-3)
    assert any(np.asarray(leaf).any() for leaf in jax.tree.leaves(found))


def test_importance_weights():
    sampler, trainer = (
        jnp.log(jnp.asarray([[0.5, 0.1, 0.2]])),
        jnp.log(jnp.asarray([[0.4, 0.5, 0.2]])),
    )
    truncated = mpjax.importance_weights(sampler, trainer)
    np.testing.assert_allclose(truncated, [[0.8, 2.0, 1.0]], rtol=1e-6)
    masked = mpjax.importance_weights(sampler, trainer, cap=3, kind="mask")
    np.testing.assert_allclose(masked, [[0.8, 0.0, 1.0]], rtol=1e-6)
    slope = jax.grad(lambda x: mpjax.importance_weights(sampler, x).sum())(trainer)
    assert not slope.any()
    delta = np.array([np.log(0.8), 0.0])
    found = mpjax.mismatch(sampler, trainer, np.array([[True, False, True]]))
    assert found.tokens == 2
    np.testing.assert_allclose(found.mean, abs(delta).mean(), rtol=1e-5)
    np.testing.assert_allclose(found.largest, 0.1, rtol=1e-5)
    np.testing.assert_allclose(found.kl, (np.expm1(delta) - delta).mean(), rtol=1e-4)
    np.testing.assert_allclose(found.effective, 1.8**2 / (1 + 0.64) / 2, rtol=1e-5)


def test_arguments(tiny):
    one = np.zeros((1, 2))
    for call, message in {
        (lambda: mpjax.token_logprobs(tiny, [[1, 2]])): "model is .*expected a Decoder",
        (lambda: mpjax.token_logprobs(tiny.model, [[1]])): "tokens have one column",
        (
            lambda: mpjax.token_logprobs(tiny.model, [[1, 2]], [1, 2])
        ): "lengths are .*shape \\(1,\\)",
        (lambda: mpjax.token_logprobs(tiny.model, [[1, 2]], temperature=0)): "temperature is 0",
        (lambda: mpjax.mismatch(one, one[0])): "trainer has shape \\(2,\\)",
        (lambda: mpjax.mismatch(one, one, one)): "the mask has no token",
        (lambda: mpjax.importance_weights(one, one, cap=0)): "cap is 0: expected",
        (lambda: mpjax.importance_weights(one, one, kind="cut")): "kind is 'cut': expected",
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
