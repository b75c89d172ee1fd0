from __future__ import annotations

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.engine import temporary
from mpjax.errors import NotFiniteError
from mpjax.evaluation.perplexity import evaluate, read_held_out, token_scores
from mpjax.kernels import KVFormat
from mpjax.memory import DeviceMemoryError
from tests.mpjax.odd_models import with_damaged_token

pytestmark = pytest.mark.usefixtures("exact_products")

WINDOW = 24
BATCH = 3
# A short document, an empty one, and one of three windows: the second batch is not full.
DOCUMENTS = [
    "import os\nimport sys",
    "",
    "def f(x):\n    return x + 1\n\nprint(f(41), 'größer')\n" * 2,
]


def windows_of(tokenizer, documents=DOCUMENTS, window=WINDOW):
    """Windows as the docstring defines them: (context tokens, tokens to predict)."""
    for text in documents:
        ids = [0, *tokenizer.encode(text)]  # <|endoftext|> is token 0
        for begin in range(0, len(ids) - 1, window):
            piece = ids[begin : begin + window + 1]
            yield piece[:-1], piece[1:]


def nats_of(logits, targets):
    """The sum of −ln p, by numpy in float64; logits [tokens, vocabulary]."""
    logits = np.asarray(logits, np.float64)
    peak = logits.max(-1)
    sums = peak + np.log(np.exp(logits - peak[:, None]).sum(-1))
    return float((sums - logits[np.arange(len(targets)), targets]).sum())


@pytest.fixture
def chunked(tiny, monkeypatch):
    """`evaluate` on the documents, in pieces of 16 tokens: windows take two of them."""
    monkeypatch.setattr(temporary, "CHUNK_ON_CPU", 16)
    return lambda lm=tiny: evaluate(lm, DOCUMENTS, window=WINDOW, batch=BATCH)


@jax.jit
def _forward(model, tokens):
    return model(tokens)


def forward(model, ids):
    """Logits of the full forward pass over at most three windows, [tokens, vocabulary]."""
    padded = np.zeros((1, 3 * WINDOW), np.int32)
    padded[0, : len(ids)] = ids
    return np.asarray(_forward(model, jnp.asarray(padded)))[0, : len(ids)]


def test_it_is_the_cross_entropy_of_the_full_forward_pass(tiny, chunked):
    nats = count = 0
    for context, targets in windows_of(tiny.tokenizer):
        logits = forward(tiny.model, context)
        nats += nats_of(logits, targets)
        count += len(targets)
    found = chunked()
    assert found.tokens == count > 2 * WINDOW
    assert found.window == WINDOW
    assert found.nats_per_token == pytest.approx(nats / count, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(nats / count), rel=1e-5)
    size = len("".join(DOCUMENTS).encode())
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-5)


@pytest.mark.parametrize("bits", [16, 4])
def test_it_reads_the_cache_as_decoding_does(tiny, chunked, bits):
    """Token by token through `step`, each window with a cache of its own."""
    format = KVFormat(bits)

    @jax.jit
    def step(model, token, cache):
        return model.step(token, jnp.ones(1, jnp.int32), cache)

    nats = count = 0
    for context, targets in windows_of(tiny.tokenizer):
        cache = tiny.model.create_cache(1, WINDOW, format, 64)
        for token, target in zip(context, targets, strict=True):
            logits, cache = step(tiny.model, jnp.full((1, 1), token, jnp.int32), cache)
            nats += nats_of(logits, [target])
            count += 1
    found = chunked(lm=dataclasses.replace(tiny, kv_format=format))
    # Sums in another order can move a value over a rounding boundary of its code.
    assert found.nats_per_token == pytest.approx(nats / count, rel=1e-5 if bits == 16 else 1e-4)
    if bits == 4:
        assert abs(found.nats_per_token / chunked().nats_per_token - 1) > 1e-3


def test_batches_and_chunks_do_not_matter(tiny, chunked, monkeypatch):
    expected = chunked()
    monkeypatch.setattr(temporary, "CHUNK_ON_CPU", 1024)
    found = evaluate(tiny, DOCUMENTS, window=WINDOW, batch=100)
    assert found.nats_per_token == pytest.approx(expected.nats_per_token, rel=1e-5)


def test_each_token_has_a_score_in_the_order_given(tiny, monkeypatch):
    monkeypatch.setattr(temporary, "CHUNK_ON_CPU", 16)
    sequences = [np.asarray(tiny.tokenizer.encode(text), np.int32) for text in DOCUMENTS[::2]]
    sequences = [sequences[0][:1], *sequences]  # nothing to predict in the first
    found = token_scores(tiny, sequences, batch=BATCH)
    assert [len(scores.logprobs) for scores in found] == [len(ids) - 1 for ids in sequences]
    for ids, scores in zip(sequences, found, strict=True):
        logits = forward(tiny.model, ids)
        for position, target in enumerate(ids[1:].tolist()):
            expected = -nats_of(logits[position : position + 1], [target])
            assert scores.logprobs[position] == pytest.approx(expected, rel=1e-4)
            assert scores.greedy[position] == (np.argmax(logits[position]) == target)
    assert token_scores(tiny, []) == []
    for alone in token_scores(tiny, sequences[:1] * BATCH, batch=BATCH):
        assert (len(alone.logprobs), len(alone.greedy)) == (0, 0)


def test_an_empty_sequence_has_no_score(tiny):
    sequence = np.asarray(tiny.tokenizer.encode(DOCUMENTS[0]), np.int32)
    empty = sequence[:0]
    before, found, after = token_scores(tiny, [empty, sequence, empty], batch=2)
    [alone] = token_scores(tiny, [empty])
    for scores in (before, after, alone):
        assert (scores.logprobs.shape, scores.greedy.shape) == ((0,), (0,))
    [expected] = token_scores(tiny, [sequence], batch=2)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=1e-5)


def test_large_vocabularies_get_short_chunks(tiny, chunked, monkeypatch):
    expected = chunked()
    monkeypatch.setattr(temporary, "CHUNK_ON_CPU", 1024)
    for tokens in (4 * temporary.CHUNK_UNIT, 1):
        monkeypatch.setattr(temporary, "SCORING_BYTES", tokens * tiny.config.vocab_size * 4)
        with temporary.scoring_engine(tiny, 8, 1000) as engine:
            assert engine._runner.programs.scored_size == max(tokens, temporary.CHUNK_UNIT)
    assert chunked().nats_per_token == pytest.approx(expected.nats_per_token, rel=1e-5)


def test_the_window_is_by_default_what_the_model_can_see(tiny):
    text = ["x = [1, 2]\n" * 60]
    assert tiny.config.max_position_embeddings == 256
    assert evaluate(tiny, text) == evaluate(tiny, text, window=256)


def test_joined_windows_are_those_of_papers(tiny, chunked):
    """Whole windows of the joined text, each without its first token; a shorter stride overlaps."""
    ids = tiny.tokenizer.encode("\n\n".join(DOCUMENTS))
    for stride, skipped in ((WINDOW, 1), (WINDOW // 3, WINDOW - WINDOW // 3)):
        nats = count = size = 0
        for begin in range(0, len(ids) - WINDOW + 1, stride):
            piece = ids[begin : begin + WINDOW]
            first = 1 if begin == 0 else skipped
            nats += nats_of(forward(tiny.model, piece)[first - 1 : -1], piece[first:])
            count += len(piece) - first
            size += len(tiny.tokenizer.decode(piece[first:]).encode())
        found = evaluate(tiny, DOCUMENTS, window=WINDOW, stride=stride, batch=BATCH)
        assert (found.tokens, found.window, found.stride) == (count, WINDOW, stride)
        assert found.nats_per_token == pytest.approx(nats / count, rel=1e-5)
        assert found.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-5)


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        ("import os", {}, r"documents is a text: pass a list, \[text\]"),
        ([], {}, "no token to predict"),
        (["", ""], {}, "no token to predict"),
        (["x"], {"window": 257}, "window is 257: expected at most 256, the positions"),
        (["x"], {"window": 0}, "window is 0"),
        (["x"], {"window": 8, "stride": 9}, "stride is 9: expected at most 8, the window"),
        (["x"], {"stride": 0}, "stride is 0: expected 1 or more"),
        (["x"], {"stride": 8}, "no token to predict"),
        (["x = y"], {"window": 1, "stride": 1}, r"in windows of 1: .* a longer window"),
        (["x"], {"batch": 0}, "batch is 0: expected 1 or more"),
        (["x"], {"batch": "8"}, "batch is '8': expected 1 or more, a whole number"),
        (["x"], {"window": 16.0}, r"window is 16\.0: expected 1 or more, a whole number"),
        (7, {}, "documents is 7: expected a list of texts"),
        ([b"x"], {}, r"documents is \[b'x'\]: expected a list of texts"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(tiny, documents, options, message):
    with pytest.raises(ValueError, match=message):
        evaluate(tiny, documents, **options)


def test_it_needs_a_tokenizer_that_fits(tiny):
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        evaluate(dataclasses.replace(tiny, tokenizer=None), ["x"])
    small = dataclasses.replace(tiny.config, vocab_size=10)
    other = dataclasses.replace(tiny)
    object.__setattr__(other, "model", type("Model", (), {"config": small})())
    with pytest.raises(ValueError, match="not from the same checkpoint"):
        evaluate(other, ["import os"])
    with pytest.raises(ValueError, match="gave token -1, and the model knows 0 to 2047"):
        token_scores(tiny, [np.asarray([3, -1])])


def test_what_is_not_finite_is_no_perplexity(tiny, chunked):
    """The windows are those of the documents, in their order; sequences have their own name."""
    [*_, target] = windows_of(tiny.tokenizer)
    token = target[0][-1]  # of the last window's context
    windows = [i for i, (context, _) in enumerate(windows_of(tiny.tokenizer)) if token in context]
    lm = with_damaged_token(tiny, token)
    message = rf"^window {windows[0]}: the model computes NaN .* in float32, .* are damaged"
    with pytest.raises(NotFiniteError, match=message):
        chunked(lm)
    other = next(i for i in range(2048) if i != token)
    sequences = [np.asarray([other] * 3), np.asarray([other, token]), np.asarray([token] * 2)]
    assert len(token_scores(lm, sequences[:2], batch=BATCH)) == 2
    with pytest.raises(NotFiniteError, match=r"^sequence 2: "):
        token_scores(lm, sequences, batch=BATCH)


def test_memory_is_asked_for_first(tiny, monkeypatch):
    """Of the cache, and of the logits beside it."""
    cache = tiny.model.create_cache(1, 256, tiny.kv_format)
    for free in (100, cache.nbytes):
        monkeypatch.setattr("mpjax.memory.free_bytes", lambda device, free=free: free)
        with pytest.raises(DeviceMemoryError, match="a KV16 cache for 1 × 16 tokens"):
            evaluate(tiny, ["x = 1"])


def test_the_held_out_text_can_be_read(tmp_path):
    texts = read_held_out(mpjax.bundled_model() / "held_out.jsonl")
    assert len(texts) == 17
    assert sum(len(text.encode()) for text in texts) == 150180
    path = tmp_path / "texts.jsonl"
    # A line separator inside a text is no end of a line.
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in ("é\u2028\x85", "")]
    path.write_text("\n \n".join(lines) + "\n\n", encoding="utf-8")
    assert read_held_out(path) == ["é\u2028\x85", ""]


@pytest.mark.parametrize("line", ["{", "[]", '{"txt": "a"}', '{"text": 3}', "3", "[" * 99_999])
def test_a_line_of_another_form_is_named(tmp_path, line):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "fine"}\n' + line, encoding="utf-8")
    with pytest.raises(ValueError, match=r"texts\.jsonl, line 2, (is|has) "):
        read_held_out(path)


def test_a_file_of_another_encoding_is_named(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "größer"}', encoding="latin-1")
    with pytest.raises(ValueError, match=r"texts\.jsonl is not a text in UTF-8"):
        read_held_out(path)
