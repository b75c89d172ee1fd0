from __future__ import annotations

import itertools

import numpy as np
import pytest

from mpjax.evaluation import windows
from mpjax.evaluation.windows import document_tokens

pytestmark = pytest.mark.any_version

TEXTS = ["import os", "", "def f(x):\n    return x + 1\n" * 3]


@pytest.mark.parametrize("special", [{"bos_token": None}, {"bos_token": "<|none|>"}])
def test_without_bos_a_document_begins_with_eos(tiny, special, monkeypatch):
    tokenizer = tiny.tokenizer
    tokens = tokenizer.special_tokens | special
    assert tokens["eos_token"] == "<|endoftext|>"
    expected = document_tokens(tokenizer, "import")
    monkeypatch.setattr(tokenizer, "bos_id", None)
    monkeypatch.setattr(tokenizer, "special_tokens", tokens)
    assert document_tokens(tokenizer, "import") == expected == [0, *tokenizer.encode("import")]
    assert document_tokens(tokenizer, "<|endoftext|>x")[0] == 0
    assert len(document_tokens(tokenizer, "<|endoftext|>x")) == 2
    monkeypatch.setattr(tokenizer, "special_tokens", {})
    assert document_tokens(tokenizer, "import") == tokenizer.encode("import")


def test_first_pieces_are_of_one_document_each_and_not_too_many(tiny):
    def pieces(most):
        size = tiny.config.vocab_size
        return list(windows.first_pieces(tiny.tokenizer, TEXTS, size, window=4, most=most))

    whole = {number: document_tokens(tiny.tokenizer, TEXTS[number]) for number in (0, 2)}
    assert [number for number, _ in pieces(1000)] == sorted(number for number, _ in pieces(1000))
    for number, ids in whole.items():
        assert [i for owner, piece in pieces(1000) if owner == number for i in piece] == ids
    count = len(whole[0]) + 5
    assert sum(len(piece) for _, piece in pieces(count)) == count
    assert max(len(piece) for _, piece in pieces(1000)) == 4
    with pytest.raises(ValueError, match="the model knows 0 to 0"):
        list(windows.first_pieces(tiny.tokenizer, TEXTS, 1, window=4, most=9))


@pytest.mark.parametrize("window", [1, 5, 1000])
def test_apart_every_token_of_a_document_is_predicted_once(tiny, window):
    pieces = windows.apart(tiny.tokenizer, TEXTS, window)
    predicted = np.concatenate([piece.tokens[piece.first :] for piece in pieces])
    assert predicted.tolist() == [i for text in TEXTS for i in tiny.tokenizer.encode(text)]
    assert all(1 <= piece.predicted <= window for piece in pieces)
    for before, piece in itertools.pairwise(pieces):
        assert piece.tokens[0] in (0, before.tokens[-1])


@pytest.mark.parametrize(("window", "stride"), [(8, 8), (8, 3), (8, 1), (1000, 1000)])
def test_joined_windows_are_whole_and_predict_tokens_once(tiny, window, stride):
    ids = tiny.tokenizer.encode("\n\n".join(TEXTS))
    pieces = windows.joined(tiny.tokenizer, TEXTS, window, stride)
    assert all(len(piece.tokens) == min(window, len(ids)) for piece in pieces)
    begins = [index * stride for index in range(len(pieces))]
    places = [
        begin + place
        for begin, piece in zip(begins, pieces, strict=True)
        for place in range(piece.first, len(piece.tokens))
    ]
    for begin, piece in zip(begins, pieces, strict=True):
        assert piece.tokens.tolist() == ids[begin : begin + window]
    assert places == sorted(set(places))
    last = begins[-1] + len(pieces[-1].tokens)
    assert len(ids) - last < stride
    assert places == [i for i in range(last) if i and (stride < window or i % window)]
