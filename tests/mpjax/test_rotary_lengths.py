"""LongRoPE and dynamic scaling: each row has the frequencies of its own tokens."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.engine import temporary
from mpjax.evaluation.perplexity import token_scores
from mpjax.kernels import KVFormat
from tests.models.sharded_decoders import divide
from tests.mpjax.rotary_lengths import KINDS, NEW, ORIGINAL, model_of, prompts, said, said_alone


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


def test_rows_say_what_they_say_alone(kind):
    assert said(model_of(kind), prompts()) == said_alone(kind)
    fewer = said(model_of(kind), prompts()[:1], ORIGINAL - 5)
    assert fewer == [said_alone(kind)[0][: ORIGINAL - 5]]


def test_a_row_says_what_whole_reads_of_it_say():
    """As in transformers, where a row that passes the original context is read again."""
    model, row = model_of("longrope"), list(prompts()[0])
    whole = jax.jit(lambda tokens: model(tokens))
    for _ in range(2 * (ORIGINAL - len(row))):
        row.append(int(whole(jnp.asarray([row]))[0, -1].argmax()))
    new = row[len(prompts()[0]) :]
    assert new == said_alone("longrope")[0][: len(new)]


@pytest.mark.parametrize("format", ["KV8", "K4cV4c"])
def test_a_row_that_is_read_again_leaves_others_as_they_are(format):
    options = {"kv_format": format}
    alone = [said(model_of("longrope"), [row], **options)[0] for row in prompts()[:2]]
    assert said(model_of("longrope"), prompts()[:2], **options) == alone


@pytest.mark.parametrize("page_size", [16, 128])
def test_texts_do_not_depend_on_pages(kind, page_size):
    tokenizer = mpjax.load(mpjax.bundled_model()).tokenizer
    lm = mpjax.LanguageModel(model_of(kind), tokenizer, KVFormat(16), Path(), page_size)
    options = {"max_new_tokens": NEW, "sampling": {"stop_ids": ()}}
    assert mpjax.generate(lm, prompts(), **options).tokens == said_alone(kind)
    streamed = "".join(mpjax.stream(lm, prompts()[0], **options))
    assert streamed == mpjax.generate(lm, prompts()[:1], **options).text[0]


@pytest.mark.parametrize("proposer", ["ngram", "draft"])
def test_speculation_passes_the_original_context(kind, proposer):
    speculate = mpjax.Ngram(k=3, n=1)
    if proposer == "draft":
        draft = mpjax.LanguageModel(model_of(kind), None, KVFormat(16), Path())
        speculate = mpjax.Draft(draft, k=3)
    assert said(model_of(kind), prompts(), speculate=speculate) == said_alone(kind)


def test_a_divided_model_says_the_same(kind):
    assert said(divide(model_of(kind), 1), prompts()) == said_alone(kind)


def test_sequences_are_scored_as_whole_reads_are(kind, monkeypatch):
    """In chunks, and beside longer ones."""
    monkeypatch.setattr(temporary, "CHUNK_ON_CPU", 64)
    model = model_of(kind)
    lm = mpjax.LanguageModel(model, None, KVFormat(16), Path(), 16)
    sequences = [np.asarray(row, np.int32) for row in prompts()]
    for row, found in zip(sequences, token_scores(lm, sequences), strict=True):
        logprobs = jax.nn.log_softmax(model(row[None, :-1]))[0]
        expected = np.take_along_axis(logprobs, row[1:, None], axis=1)[:, 0]
        np.testing.assert_allclose(found.logprobs, expected, atol=1e-3)
