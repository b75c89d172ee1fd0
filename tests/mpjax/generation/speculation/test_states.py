"""Speculation over models whose layers keep a state of each sequence."""

from __future__ import annotations

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.generation.decoding import generate_tokens
from mpjax.kernels import KVFormat
from tests.models.small import hybrid_model, logits_of
from tests.mpjax.engine.conftest import Knowing, make_engine, require_order, resize
from tests.mpjax.generation.speculation.test_draft import (
    HOT,
    PROMPT,
    ROWS,
    WORDS,
    language_model,
    surprise,
)

pytestmark = pytest.mark.usefixtures("exact_products")

NEW = 24
TEXTS = [[1 + (n + i) * (i + 3) % 31 for i in range(20 + 9 * n)] for n in range(4)]
SAMPLING = {"temperature": np.array([0, 0.7, 1.5, 0]), "stop_ids": ()}


@pytest.fixture(scope="module")
def prompts():
    padded = np.zeros((4, 48), np.int32)
    for row, text in zip(padded, TEXTS, strict=True):
        row[: len(text)] = text
    return jnp.asarray(padded), jnp.array([len(text) for text in TEXTS])


def run(model, prompts, proposer=None):
    return generate_tokens(
        model, *prompts, max_new_tokens=NEW, sampling=SAMPLING, speculate=proposer
    )


def test_tokens_are_those_of_plain_decoding(prompts):
    """Of rows that are greedy and of others, whose proposals are right, wrong, and right at first;
    with a draft that keeps states, too, whose own opinion is often another.
    """
    model = hybrid_model()
    plain = run(model, prompts)
    said = [text + own for text, own in zip(TEXTS, plain.tokens.tolist(), strict=True)]
    found = run(model, prompts, Knowing.of(said))
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    done = found.speculated
    assert (done.accepted > NEW // 3).all()
    assert (done.accepted < done.proposed).all()
    greedy = np.array([0, 3])
    same = mpjax.Draft(language_model(model), k=3)
    other = hybrid_model()
    table = other.embedding.get_value()
    other.embedding.set_value(table + 0.3 * jax.random.normal(jax.random.key(1), table.shape))
    for draft, is_same in ((same, True), (mpjax.Draft(language_model(other), k=3), False)):
        found = run(model, prompts, draft)
        np.testing.assert_array_equal(found.tokens[greedy], plain.tokens[greedy])
        accepted = np.asarray(found.speculated.accepted)
        if is_same:
            np.testing.assert_array_equal(accepted, found.speculated.proposed)
        else:
            assert 0 < accepted.sum() < np.asarray(found.speculated.proposed).sum()


@pytest.mark.sweep
def test_texts_have_the_models_distribution():
    """With a draft, of all texts of three words."""
    model, other = (hybrid_model(seed, vocab_size=WORDS) for seed in (1, 2))
    own = model.embedding.get_value()
    other.embedding.set_value(0.7 * own + 0.3 * other.embedding.get_value())
    found = generate_tokens(
        model,
        jnp.tile(jnp.array([PROMPT]), (ROWS, 1)),
        jnp.full(ROWS, len(PROMPT)),
        max_new_tokens=3,
        sampling={"temperature": HOT, "stop_ids": ()},
        speculate=mpjax.Draft(language_model(other), k=2),
    )
    texts = np.array([(*PROMPT, *rest) for rest in itertools.product(range(WORDS), repeat=3)])
    logits = np.asarray(logits_of(model, jnp.asarray(texts)), np.float64)
    logits = logits[:, len(PROMPT) - 1 : -1] / HOT
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    each = np.take_along_axis(logits, texts[:, len(PROMPT) :, None], -1)[..., 0]
    chances = np.exp(each.sum(-1))
    assert abs(surprise(found.tokens, chances)) < 5
    assert surprise(found.tokens, np.roll(chances, 1)) > 50, "the test can't fail"
    done = found.speculated
    assert 200 < int(done.accepted.sum()) < int(done.proposed.sum()) - 200


def test_an_engine_speculates_where_rows_come_go_and_are_read_again(tiny):
    """Also behind snapshots, and for rows with a constraint."""
    model = hybrid_model(vocab_size=tiny.config.vocab_size)
    lm = dataclasses.replace(tiny, model=model, kv_format=KVFormat(16))
    common = [1 + i * i % 29 for i in range(40)]
    words = mpjax.Regex("([a-z]{1,5} ){3,}")
    options = {"max_new_tokens": NEW, "sampling": {"temperature": 1.0, "stop_ids": ()}}
    asked = [(common + text, {"seed": n}) for n, text in enumerate(TEXTS[:2])]
    asked.append((asked[0][0], {"constraint": words}))
    sizes = {"slots": 2, "chunk_tokens": 16}
    with make_engine(lm, **sizes) as engine:
        plain = [engine.submit(text, **options, **how).result() for text, how in asked]
    said = [text + handle.tokens for (text, _), handle in zip(asked, plain, strict=True)]
    with make_engine(lm, speculate=Knowing.of(said), **sizes) as engine:
        resize(engine, pages=5)
        handles = [engine.submit(text, **options, **how) for text, how in asked * 2]
        while engine.has_work:
            engine.step()
            require_order(engine._runner.planner)
        for handle, expected in zip(handles, plain * 2, strict=True):
            assert handle.tokens == expected.tokens
        numbers = engine.statistics()
    assert numbers["preemptions"] > 0
    assert numbers["shared_tokens"] > 0
    assert NEW < numbers["accepted_tokens"] < numbers["proposed_tokens"]
    assert re.match("[a-z]{1,5}", handles[2].text)
