from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax.errors import NotFiniteError
from mpjax.evaluation import reading
from mpjax.evaluation.comparison import _differ, compare
from mpjax.evaluation.perplexity import evaluate
from tests.models.small import small_config
from tests.mpjax.odd_models import with_damaged_token

pytestmark = pytest.mark.usefixtures("exact_products")

DOCUMENTS = ["def f(x):\n    return x + 1\n", "import os\nprint(os.getcwd(), [1, 2, 3])\n"] * 2
WINDOW = 16


@pytest.fixture(scope="module")
def rounded(tiny_folder):
    return mpjax.load(tiny_folder, precision="WNF4A32KV8")


@jax.jit
def forward(model, ids):
    return model(ids)


def test_it_is_what_numpy_finds_of_whole_logits(tiny, rounded, monkeypatch):
    """In float64, from a forward pass without a cache."""
    monkeypatch.setattr(reading, "MAXIMUM_CHUNK", 8)
    plain = dataclasses.replace(rounded, kv_format=tiny.kv_format)
    found = compare(plain, tiny, DOCUMENTS, window=WINDOW, batch=2)
    ids = tiny.tokenizer.encode("\n\n".join(DOCUMENTS))
    count = len(ids) // WINDOW
    tokens = jnp.asarray(ids[: count * WINDOW]).reshape(count, WINDOW)
    chances = []
    for model in (tiny.model, rounded.model):
        logits = np.asarray(forward(model, tokens), np.float64)[:, :-1]
        chances.append(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
    exact, other = chances
    divergences = (np.exp(exact) * (exact - other)).sum(-1)
    assert found.tokens == divergences.size == count * (WINDOW - 1)
    assert found.kl_mean == pytest.approx(divergences.mean(), rel=1e-3)
    assert found.kl_median == pytest.approx(np.median(divergences), rel=1e-3)
    assert found.kl_p99 == pytest.approx(np.percentile(divergences, 99), rel=1e-3)
    error = divergences.std(ddof=1) / math.sqrt(divergences.size)
    assert found.kl_error == pytest.approx(error, rel=1e-3)
    assert found.same_top == (exact.argmax(-1) == other.argmax(-1)).mean()
    assert 0 < found.same_top < 1


def test_perplexities_are_those_of_evaluate(tiny, rounded, monkeypatch):
    """The comparison is also of a cache in 8 bits."""
    monkeypatch.setattr(reading, "MAXIMUM_CHUNK", 8)
    found = compare(rounded, tiny, DOCUMENTS, window=WINDOW, batch=2)
    expected = evaluate(rounded, DOCUMENTS, window=WINDOW, stride=WINDOW, batch=2)
    for field in dataclasses.fields(expected):
        value = getattr(expected, field.name)
        assert getattr(found, field.name) == pytest.approx(value, rel=1e-6)
    exact = evaluate(tiny, DOCUMENTS, window=WINDOW, stride=WINDOW, batch=2)
    assert found.reference_perplexity == pytest.approx(exact.perplexity, rel=1e-6)


def test_a_model_does_not_differ_from_itself(tiny):
    found = compare(tiny, tiny, DOCUMENTS, window=WINDOW, stride=5, batch=2)
    assert (found.kl_mean, found.kl_p99, found.kl_error, found.same_top) == (0, 0, 0, 1)
    assert found.perplexity == found.reference_perplexity
    assert found.stride == 5


def test_the_default_window_fits_both_models(tiny):
    short = dataclasses.replace(tiny, model=nnx.clone(tiny.model))
    short.model.limit_positions(WINDOW)
    for lm, reference in ((tiny, short), (short, tiny)):
        assert compare(lm, reference, DOCUMENTS, batch=2).window == WINDOW
    with pytest.raises(ValueError, match=f"expected at most {WINDOW}, the positions"):
        compare(tiny, short, DOCUMENTS, window=2 * WINDOW)


def test_other_vocabularies_and_tokenizers_are_refused(tiny, monkeypatch):
    small = dataclasses.replace(tiny.config, vocab_size=2047)
    other = dataclasses.replace(tiny)
    object.__setattr__(other, "model", type("Model", (), {"config": small})())
    with pytest.raises(ValueError, match="2048 tokens, and the reference one of 2047"):
        compare(tiny, other, DOCUMENTS)
    reads = tiny.tokenizer.encode
    tokenizer = type("Tokenizer", (), {"encode": lambda self, text: reads(text[::-1])})()
    tokenizer.decode = tiny.tokenizer.decode
    other = dataclasses.replace(tiny, tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"tokenizers .* give different tokens"):
        compare(tiny, other, DOCUMENTS)
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        compare(tiny, dataclasses.replace(tiny, tokenizer=None), DOCUMENTS)


def test_what_is_not_finite_has_its_window(tiny):
    ids = tiny.tokenizer.encode("\n\n".join(DOCUMENTS))
    damaged = with_damaged_token(tiny, ids[WINDOW])
    first = next(i for i in range(9) if ids[WINDOW] in ids[i * WINDOW : (i + 1) * WINDOW - 1])
    with pytest.raises(NotFiniteError, match=f"^window {first}: .* in float32"):
        compare(tiny, damaged, DOCUMENTS, window=WINDOW)


class Padded(nnx.Module):
    """Logits of a model, with as many columns of -inf behind them as a divided model may have."""

    def __init__(self, logits, columns):
        self.logits, self.columns = nnx.Param(logits), columns
        self.config = small_config(vocab_size=logits.shape[-1])

    def step(self, tokens, counts, cache, *, every_position):
        padding = (0, 0), (0, 0), (0, self.columns)
        return jnp.pad(self.logits.get_value(), padding, constant_values=-jnp.inf), cache


@pytest.mark.parametrize("columns", [(1, 1), (1, 0), (0, 2)])
def test_columns_behind_the_vocabulary_do_not_count(columns, rng):
    """Only divided models have them."""
    logits = [jnp.asarray(rng.standard_normal((1, 3, 5)), jnp.float32) for _ in range(2)]
    tokens, counts = jnp.asarray([[0, 1, 2, 4]]), jnp.asarray([3])
    plain, padded = (
        _differ(tuple(map(Padded, logits, numbers)), tokens, counts, (jnp.zeros(1), jnp.zeros(1)))[
            0
        ]
        for numbers in ((0, 0), columns)
    )
    for found, expected in zip(padded, plain, strict=True):
        np.testing.assert_array_equal(found, expected)
    assert np.all(np.asarray(padded[2]) > 0)
