"""An EAGLE-3 head learns to propose what a model says."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.checkpoint.drafter import add_drafter
from mpjax.kernels import KVFormat
from mpjax.models.eagle import tokens_place
from mpjax.models.parameters import find
from mpjax.trainers.drafter import drafter_loss
from tests.models.small import CONFIG, eagle_model, small_model

pytest.importorskip("optax")
TEXT = "\n".join(np.random.default_rng(0).choice(list("abcdefgh"), 2000))


@pytest.fixture(scope="module")
def lm(tiny):
    """A model whose next token depends on little but the last, with `tiny`'s tokenizer."""
    model = small_model(dataclasses.replace(CONFIG, vocab_size=tiny.config.vocab_size))
    for place in model.linear_places(model.config):
        if place.path.endswith(("attention.output", "mlp.down")):
            kernel = find(model, place.path).kernel
            kernel.set_value(0.1 * kernel.get_value())
    return dataclasses.replace(tiny, model=model, kv_format=KVFormat(16))


def accepted(lm, folder, ids):
    """The share of accepted tokens, of those that occur in the text."""
    headed = lm.with_model(add_drafter(lm.model, folder))
    sampling = {"temperature": 0, "stop_ids": (), "allowed_ids": ids}
    options = {"prompts": ["a", "b\nc", "h\ng\nd"], "max_new_tokens": 24, "sampling": sampling}
    found = mpjax.generate(headed, speculate="eagle:3", **options)
    assert found.tokens == mpjax.generate(lm, **options).tokens
    return sum(found.speculation.accepted) / sum(found.speculation.proposed)


def test_a_few_steps_lower_the_loss_and_raise_acceptance(lm, tmp_path):
    ids = sorted({*lm.tokenizer.encode(TEXT)})
    settings = {"batch": 8, "length": 32, "rate": 1e-2, "passes": 2, "vocabulary": len(ids)}
    training = mpjax.DrafterTraining(steps=60, **settings)
    losses = mpjax.train_drafter(lm, [TEXT], tmp_path / "head", training)
    assert len(losses) == 60
    assert np.mean(losses[-5:]) < 0.8 * losses[0]
    mpjax.train_drafter(lm, [TEXT], tmp_path / "random", dataclasses.replace(training, steps=1))
    trained, random = (accepted(lm, tmp_path / name, ids) for name in ("head", "random"))
    assert trained > random + 0.2


def test_the_first_pass_has_the_cross_entropy_of_both_distributions():
    """The target is the model's distribution over the head's vocabulary."""
    model = eagle_model(tokens=20)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 50, (2, 9)))
    ids = np.asarray(tokens_place(model.config).read(model))
    found = drafter_loss(model, tokens, jax.random.key(0), 1)
    cache = model.create_cache(2, 16, "KV16", 16)
    total = []
    for place in range(9):
        if place:
            logits = model.draft(tokens[:, place], jnp.ones(2, jnp.int32), cache)[0][:, ids]
            wanted = model(tokens)[:, place][:, ids]
            total.append(-(jax.nn.softmax(wanted) * jax.nn.log_softmax(logits)).sum(-1))
        cache = model.step(tokens[:, place : place + 1], jnp.ones(2, jnp.int32), cache)[1]
    np.testing.assert_allclose(found, np.mean(total), rtol=1e-3)


def test_what_cannot_be_trained_is_refused(lm, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    for words, settings, text, name in (
        ("is not empty: choose another folder", {}, TEXT, "full"),
        ("the documents have 1 tokens: expected 32 or more", {}, "a", "head"),
        ("vocabulary is 4096: expected at most", {"vocabulary": 4096}, TEXT, "head"),
        (r"reads are \[9\]: expected rising numbers", {"layers": (9,)}, TEXT, "head"),
    ):
        training = mpjax.DrafterTraining(steps=1, length=32, **settings)
        with pytest.raises(ValueError, match=words):
            mpjax.train_drafter(lm, [text], tmp_path / name, training)
    with pytest.raises(ValueError, match=r"documents is a text: pass a list, \[text\]"):
        mpjax.train_drafter(lm, TEXT, tmp_path / "head")
    for name, value, words in (
        ("steps", 0, "DrafterTraining: steps is 0"),
        ("rate", -1, "rate is -1: expected a positive, finite number"),
        ("rate", np.inf, "rate is inf: expected a positive, finite number"),
        ("rate", True, "rate is True: expected a positive, finite number"),
        ("seed", -1, "seed is -1: expected 0 or more, a whole number"),
        ("length", 1, "length is 1: expected 2 or more tokens"),
    ):
        with pytest.raises(ValueError, match=words):
            mpjax.DrafterTraining(**{name: value})
