"""The training loop, on a model and a text small enough for a CPU."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples.train_bundled_model import optimize
from examples.train_bundled_model.recipe import Recipe, TrainingError
from mpjax.models import DecoderConfig, Llama, llama_layers

VOCABULARY = 32
CONFIG = DecoderConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    layers=llama_layers((None, None), 64),
    max_position_embeddings=16,
    tie_word_embeddings=True,
)
RECIPE = Recipe(
    steps=40,
    learning_rate=1e-2,
    weight_decay=0.1,
    noise=0.0,
    batch=4,
    context=16,
    interval=20,
    compute_dtype="float32",
)
FLOAT32 = dataclasses.replace(CONFIG, dtype="float32")
PATTERN = np.tile(np.arange(VOCABULARY, dtype=np.uint16), 20)  # each token follows from the last


def train(recipe=RECIPE, tokens=PATTERN, validation=PATTERN[7:100]):
    lines: list[str] = []
    return optimize.train(recipe, CONFIG, tokens, validation, log=lines.append), lines


def weights(model):
    return [np.asarray(weight) for weight in jax.tree.leaves(model)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_loss_falls_and_every_look_is_logged(dtype):
    result, lines = train(dataclasses.replace(RECIPE, compute_dtype=dtype))
    assert [progress.step for progress in result.course] == [20, 40]
    assert result.course[0].validation_loss < math.log(VOCABULARY)
    assert result.best == result.course[1]
    assert result.best.validation_loss < 0.5
    assert result.best.train_loss < result.course[0].train_loss
    assert len(lines) == 2
    assert f"validation {result.best.validation_loss:.4f}" in lines[1]
    assert {weight.dtype for weight in weights(result.model)} == {np.dtype(np.float32)}


def test_a_seed_fixes_everything():
    noisy = dataclasses.replace(RECIPE, noise=0.1)
    first, again = train(noisy)[0], train(noisy)[0]
    other = train(dataclasses.replace(noisy, seed=2))[0]
    for one, two in zip(weights(first.model), weights(again.model), strict=True):
        np.testing.assert_array_equal(one, two)
    assert first.best.train_loss == again.best.train_loss != other.best.train_loss


def test_the_best_look_is_kept_not_the_last():
    # A model that learnt the pattern is wrong for the text that runs backwards.
    backwards = PATTERN[::-1][7:100]
    result, _ = train(validation=backwards)
    losses = [progress.validation_loss for progress in result.course]
    assert losses[0] < losses[1]
    assert result.best == result.course[0]
    looks = optimize.windows(backwards, RECIPE.context, RECIPE.batch)
    found = optimize.loss(result.model, looks, dtype=RECIPE.compute_dtype)
    assert float(found) == pytest.approx(losses[0], rel=1e-3)


def test_recipes_of_one_shape_compile_once(monkeypatch, trace_counter):
    counted = trace_counter(optimize._cross_entropy)
    monkeypatch.setattr(optimize, "_cross_entropy", counted)
    recipe = dataclasses.replace(RECIPE, steps=2, interval=2, batch=3)
    train(recipe)
    traces = counted.count
    assert traces > 0
    train(dataclasses.replace(recipe, noise=0.5, weight_decay=1.0, learning_rate=1e-3, seed=5))
    train(dataclasses.replace(recipe, steps=4))
    assert counted.count == traces


def test_divergence_is_an_error():
    with pytest.raises(optimize.DivergedError, match="lower the learning rate"):
        train(dataclasses.replace(RECIPE, steps=20, learning_rate=math.inf))


def test_a_text_shorter_than_a_window_is_an_error():
    with pytest.raises(TrainingError, match="16 tokens"):
        train(tokens=PATTERN[:16])


def test_loss_is_the_mean_cross_entropy_of_every_token_but_the_first(rng):
    tokens = rng.integers(0, VOCABULARY, 75).astype(np.uint16)
    model = Llama(FLOAT32, nnx.Rngs(0))
    forward = jax.jit(lambda model, tokens: model(tokens))
    losses = []
    for first in range(0, 74, 16):
        window = tokens[first : first + 17].astype(np.int32)
        # Causality keeps the padding, which saves compilations, out of what is looked at.
        seen = np.pad(window[:-1], (0, 17 - len(window)))
        logits = np.asarray(forward(model, jnp.asarray(seen[None])), np.float64)[0]
        logits = logits[: len(window) - 1]
        picked = logits[np.arange(len(window) - 1), window[1:]]
        losses += list(np.log(np.exp(logits).sum(1)) - picked)
    assert len(losses) == 74
    looks = optimize.windows(tokens, context=16, batch=4)
    assert looks.tokens.shape == (2, 4, 17)
    found = optimize.loss(model, looks, dtype="float32")
    assert float(found) == pytest.approx(np.mean(losses), rel=1e-5)


@pytest.mark.parametrize("size", [2, 16, 17, 18, 33, 64, 65])
def test_windows_predict_each_token_but_the_first_once(size):
    tokens = np.arange(1, size + 1, dtype=np.uint16)
    looks = optimize.windows(tokens, context=16, batch=2)
    seen, predicted = looks.tokens[..., :-1], looks.tokens[..., 1:]
    real = np.asarray(looks.weights) == 1
    np.testing.assert_array_equal(np.sort(np.asarray(predicted)[real]), tokens[1:])
    np.testing.assert_array_equal(np.asarray(seen)[real] + 1, np.asarray(predicted)[real])


def test_every_epoch_takes_every_window_once_in_a_new_order():
    recipe = dataclasses.replace(RECIPE, steps=100, batch=3)
    starts = optimize.training_starts(recipe, length=150)
    assert starts.shape == (100, 3)
    assert starts.min() >= 0
    assert starts.max() + recipe.context + 1 <= 150
    # 134 places to begin at hold 8 or 9 windows; an epoch's starts have one remainder.
    flat, epochs = starts.ravel(), []
    while len(flat) >= 9:
        offset = flat[0] % 16
        expected = np.arange(offset, 134, 16)
        epochs.append(tuple(flat[: len(expected)]))
        np.testing.assert_array_equal(np.sort(epochs[-1]), expected)
        flat = flat[len(expected) :]
    assert len(set(epochs)) == len(epochs) > 30


def test_the_shortest_text_has_one_window():
    starts = optimize.training_starts(dataclasses.replace(RECIPE, steps=2), length=17)
    assert (starts == 0).all()


def test_learning_rate_rises_then_falls_by_half_a_cosine():
    recipe = dataclasses.replace(RECIPE, steps=100, warmup=10, learning_rate=0.5)
    step = np.arange(1, 101)
    cosine = 0.05 + 0.45 * (1 + np.cos(np.pi * (step - 10) / 90)) / 2
    expected = np.where(step <= 10, 0.5 * step / 10, cosine)
    np.testing.assert_allclose(optimize.learning_rates(recipe), expected, rtol=1e-5)


def test_only_matrices_decay():
    model = Llama(FLOAT32, nnx.Rngs(0))
    zeros = jax.tree.map(jnp.zeros_like, model)
    with jax.numpy_dtype_promotion("standard"):
        optimizer = optimize._optimizer(0.5, 0.1)
        updates, _ = optimizer.update(zeros, optimizer.init(model), model)
    for weight, update in zip(weights(model), weights(updates), strict=True):
        shrink = 0.05 if weight.ndim > 1 else 0.0
        np.testing.assert_allclose(update, -shrink * weight, rtol=1e-6)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_noise_replaces_its_share_by_tokens_of_the_text(share):
    data = jnp.asarray([5, 5, 6], jnp.uint16)
    batch = jnp.full((200, 200), 9, jnp.int32)
    noisy = optimize._add_noise(jax.random.key(0), batch, data, jnp.float32(share))
    assert np.mean(noisy != 9) == pytest.approx(share, abs=0.01)
    assert np.mean(noisy == 5) == pytest.approx(share * 2 / 3, abs=0.01)
    assert noisy.dtype == batch.dtype
