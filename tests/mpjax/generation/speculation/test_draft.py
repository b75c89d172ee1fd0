"""A draft model proposes; what is generated stays the large model's."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.generation.decoding import generate_tokens
from mpjax.generation.speculation.drafting import fit
from mpjax.models import llama_layers
from mpjax.precision import Precision
from tests.models.small import forward, small_config, small_model
from tests.sweeps import in_sweep

pytestmark = pytest.mark.usefixtures("exact_products")

NEW = 20


def language_model(model, text="KV16"):
    kv = Precision.parse(f"W16A16{text}").kv
    return mpjax.LanguageModel(model, None, kv, mpjax.bundled_model())


def test_greedy_tokens_are_those_of_plain_decoding(model, prompts):
    """With a draft of fewer tokens and a cache in blocks, over the end of a block."""
    table = jax.random.normal(jax.random.key(1), (48, 64))
    other = small_model(small_config(windows=(None,), head_dim=64, vocab_size=48), seed=0)
    for name in ("embedding", "head"):
        own = getattr(model, name).get_value()[:48]
        getattr(other, name).set_value(own + 0.1 * table)
    other.layers = model.layers
    draft = mpjax.Draft(language_model(other, "KV4c"), k=3)
    plain = generate_tokens(model, *prompts, max_new_tokens=NEW)
    found = generate_tokens(model, *prompts, max_new_tokens=NEW, speculate=draft)
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    done = found.speculated
    assert (done.accepted > 0).all()
    assert int(done.accepted.sum()) < int(done.proposed.sum())
    assert (done.steps + done.accepted == NEW - 1).all()


@pytest.mark.sweep
def test_a_draft_that_is_the_model_is_always_accepted(model, prompts):
    """Then its cache lacks two tokens after each proposal, and the block's end cuts some short."""
    draft = mpjax.Draft(language_model(model, "KV8"), k=4)
    sampling = {"temperature": np.array([0, 0.5, 1, 2]), "repetition_penalty": 0.9}
    run = functools.partial(
        generate_tokens, model, *prompts, max_new_tokens=NEW, kv_format="KV8", sampling=sampling
    )
    found, again = run(speculate=draft), run(speculate=draft)
    jax.tree.map(np.testing.assert_array_equal, found, again)
    done = found.speculated
    np.testing.assert_array_equal(done.accepted, done.proposed)
    assert done.steps.tolist() == [4] * 4
    np.testing.assert_array_equal(found.tokens[:1], run().tokens[:1])


ROWS, WORDS = 10_000, 5
PROMPT, HOT = (0, 1, 2, 3, 4, 2), 4.0  # so that each word was said before


@pytest.fixture(scope="module")
def models():
    """A model of a few words, and one that is often of another opinion."""
    config = dataclasses.replace(
        small_config(windows=(None,)), vocab_size=WORDS, layers=llama_layers((None,), 32)
    )
    model, other = small_model(config, seed=1), small_model(config, seed=2)
    for name in ("embedding", "head"):
        own, theirs = (getattr(m, name).get_value() for m in (model, other))
        getattr(other, name).set_value(0.7 * own + 0.3 * theirs)
    return model, other


def chances(model):
    """The probability of each text of three words, by the full forward pass."""
    texts = np.array([(*PROMPT, *rest) for rest in itertools.product(range(WORDS), repeat=3)])
    logits = forward(model, texts)[:, len(PROMPT) - 1 : -1] / HOT
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    each = np.take_along_axis(logits, texts[:, len(PROMPT) :, None], -1)[..., 0]
    return np.exp(each.sum(-1))


def surprise(tokens, chances):
    """A χ² statistic over texts: its distance from what is expected, in standard deviations."""
    places = np.asarray(tokens) @ np.array([WORDS**2, WORDS, 1])
    found, wanted = np.bincount(places, minlength=WORDS**3), chances * len(tokens)
    common = wanted > 5
    rest = [(~common, wanted[~common].sum())]
    statistic = ((found - wanted)[common] ** 2 / wanted[common]).sum()
    statistic += sum((found[mask].sum() - total) ** 2 / total for mask, total in rest if total > 0)
    degrees = common.sum()
    return (statistic - degrees) / np.sqrt(2 * degrees)


def padded(model, words):
    """The model with a table of other size: what it lacks is cut, and what is new is likely."""
    config = dataclasses.replace(model.config, vocab_size=words)
    found = small_model(config, seed=0)
    found.layers, found.norm = model.layers, model.norm
    for name in ("embedding", "head"):
        own = getattr(model, name).get_value()[:words]
        more = jnp.tile(10 * own[:1], (words - len(own), 1))
        getattr(found, name).set_value(jnp.concatenate([own, more]))
    return found


@pytest.mark.parametrize(
    ("proposer", "words"),
    [("draft", WORDS), ("draft", WORDS + 2), in_sweep("draft", WORDS - 1), in_sweep("ngram", 0)],
)
def test_texts_have_the_models_distribution(models, proposer, words):
    """Of all texts of three words, and not the draft's, which may have other words at its end."""
    model, other = models
    draft = mpjax.Draft(language_model(padded(other, words or WORDS)), k=2)
    found = generate_tokens(
        model,
        jnp.tile(jnp.array([PROMPT]), (ROWS, 1)),
        jnp.full(ROWS, len(PROMPT)),
        max_new_tokens=3,
        sampling={"temperature": HOT, "stop_ids": ()},
        speculate=draft if proposer == "draft" else mpjax.Ngram(k=2, n=1),
    )
    assert abs(surprise(found.tokens, chances(model))) < 5
    assert surprise(found.tokens, chances(other)) > 50, "the test can't fail"
    done = found.speculated
    accepted, proposed = int(done.accepted.sum()), int(done.proposed.sum())
    assert 200 < accepted < proposed - 200


def test_its_vocabulary_and_positions_are_compared(tiny, model):
    draft = mpjax.Draft(tiny)
    draft.require(tiny.tokenizer, 256)
    draft.require(None, 256)
    with pytest.raises(ValueError, match="may have 257 tokens, and the draft model has 256 pos"):
        draft.require(tiny.tokenizer, 257)
    words = tiny.tokenizer.backend.get_vocab_size()

    def other(size, name):
        backend = SimpleNamespace(get_vocab_size=lambda: size, id_to_token=lambda i: name)
        return SimpleNamespace(backend=backend)

    def same(size):
        known = tiny.tokenizer.backend
        named = lambda i: known.id_to_token(i) or f"[PAD{i}]"  # noqa: E731 (as GGUF files name it)
        backend = SimpleNamespace(get_vocab_size=lambda: size, id_to_token=named)
        return SimpleNamespace(backend=backend)

    for size in (words - 5, words, words + 300):
        draft.require(same(size), 10)
    for size in (words - 5, words, words + 1):
        with pytest.raises(
            ValueError, match=f"another vocabulary, of {words} tokens, than .* {size}"
        ):
            draft.require(other(size, "x"), 10)
    with pytest.raises(ValueError, match="the draft model has 256 positions"):
        generate_tokens(model, [[1]], [1], max_new_tokens=257, speculate=draft)


def test_other_arguments_are_refused(tiny):
    with pytest.raises(ValueError, match="Draft: lm"):
        mpjax.Draft(tiny.model)
    with pytest.raises(ValueError, match="Draft: k is 0: expected a whole number from 1 to 32"):
        mpjax.Draft(tiny, k=0)


def test_vocabularies_of_other_sizes_are_fitted():
    logits = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(fit(logits, 2), logits[:, :2])
    wide = fit(logits, 5)
    np.testing.assert_array_equal(wide[:, :3], logits)
    assert np.isneginf(wide[:, 3:]).all()
