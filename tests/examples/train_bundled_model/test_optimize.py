"""The training loop, on a model and a text small enough for a CPU."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.train_bundled_model import optimize
from examples.train_bundled_model.recipe import Recipe
from mpjax.models import DecoderConfig, llama_layers

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


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_noise_replaces_its_share_by_tokens_of_the_text(share):
    data = jnp.asarray([5, 5, 6], jnp.uint16)
    batch = jnp.full((200, 200), 9, jnp.int32)
    noisy = optimize._add_noise(jax.random.key(0), batch, data, jnp.float32(share))
    assert np.mean(noisy != 9) == pytest.approx(share, abs=0.01)
    assert np.mean(noisy == 5) == pytest.approx(share * 2 / 3, abs=0.01)
    assert noisy.dtype == batch.dtype
