"""The tokeniser: lossless, and it cuts Python where its author says."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from examples.train_bundled_model import corpus, tokenizer

BUNDLED = tokenizer.load()


def pieces(bpe: Tokenizer, text: str) -> list[str]:
    return [bpe.decode([token]) for token in bpe.encode(text).ids]


@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    assert BUNDLED.decode(BUNDLED.encode(text).ids) == text


def test_python_is_cut_at_line_breaks_words_and_digits() -> None:
    text = "class A:\n    def __init__(self):\n        return self.x + 12\n"
    assert pieces(BUNDLED, text) == [
        "class", " A", ":", "\n    ",
        "def", " __init__", "(", "self", "):", "\n        ",
        "return", " self", ".", "x", " +", " ", "1", "2", "\n",
    ]  # fmt: skip


def test_training_is_deterministic_and_what_is_saved_loads(tmp_path: Path) -> None:
    texts = [document.text for document in corpus.read_held_out()]
    first, second = tokenizer.train(texts, 400), tokenizer.train(texts, 400)
    assert first.to_str() == second.to_str()
    assert first.get_vocab_size() == 400
    tokenizer.save(first, tmp_path)
    assert tokenizer.load(tmp_path).to_str() == first.to_str()


def test_transformers_loads_the_same_tokenizer() -> None:
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoTokenizer.from_pretrained(corpus.BUNDLED)
    text = corpus.read_held_out()[0].text
    assert loaded(text)["input_ids"] == BUNDLED.encode(text).ids
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert loaded.eos_token_id == loaded.bos_token_id == 0
    assert len(loaded) == 2048
