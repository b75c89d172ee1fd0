from __future__ import annotations

import pytest

from mpjax.serve.places import Places, prompt_places
from mpjax.text.spelling import token_bytes
from mpjax.text.tokenizer import Tokenizer
from tests.mpjax.tokenizer_folders import byte_level, llama, metaspace, sentencepiece

pytestmark = pytest.mark.any_version

TEXT = "naïve 日本語 👩‍👩‍👧 a\n  b"


@pytest.mark.parametrize("make", [lambda: byte_level(["<s>"], 270), sentencepiece, metaspace])
def test_the_text_of_a_token_stands_at_its_place(make):
    tokenizer = Tokenizer(make())
    ids = tokenizer.encode(TEXT)
    places = prompt_places(tokenizer, ids, TEXT)
    assert places == sorted(places)
    assert len({*places}) < len(ids)  # some tokens are parts of a character
    for token, place in zip(ids, places, strict=True):
        spelled = token_bytes(tokenizer, token)
        try:
            piece = spelled.decode()
        except UnicodeDecodeError:
            continue
        # SentencePiece puts a space in front of a text, which the text has not.
        assert TEXT.startswith(piece, place) or (piece == " " and place == 0)


def test_tokens_that_come_a_few_at_a_time_have_the_same_places():
    tokenizer = Tokenizer(byte_level(["<s>"]))
    ids = tokenizer.encode(TEXT)
    places = Places(tokenizer, begin=7)
    found = [place for token in ids for place in places.of([token])]
    assert found == [7 + place for place in prompt_places(tokenizer, ids, TEXT)]


def test_a_character_may_begin_in_the_prompt():
    tokenizer = Tokenizer(byte_level(["<s>"]))
    ids = tokenizer.encode("a本b")
    assert len(ids) == 5
    assert Places(tokenizer, ids[:2], 2).of(ids[2:]) == [2, 2, 3]
    assert prompt_places(tokenizer, ids[:2], tokenizer.decode(ids[:2])) == [0, 1]


def test_special_tokens_have_characters_where_the_text_has_them(tmp_path):
    tokenizer = Tokenizer.from_folder(llama(tmp_path))
    text = "a<|eot_id|>a"
    ids = tokenizer.encode(text)
    assert len(ids) == 4  # with the one that the tokenizer puts in front
    assert prompt_places(tokenizer, ids, text) == [0, 0, 1, 11]
    # In generated text they have none.
    assert Places(tokenizer).of(ids[1:]) == [0, 1, 1]
    # As ids, the first one is part of the prompt.
    text = tokenizer.decode(ids, skip_special=False)
    begin = len("<|begin_of_text|>")
    assert prompt_places(tokenizer, ids, text) == [0, begin, begin + 1, begin + 11]
