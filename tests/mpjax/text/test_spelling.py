from __future__ import annotations

import pytest

from mpjax.text.spelling import token_bytes, token_name
from mpjax.text.tokenizer import Tokenizer
from tests.mpjax.tokenizer_folders import byte_level, metaspace, sentencepiece

pytestmark = pytest.mark.any_version

TEXT = "a\n  é €\x00ab\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("make", [lambda: byte_level(["<s>"]), sentencepiece, metaspace])
def test_bytes_of_tokens_joined_are_the_text(make):
    tokenizer = Tokenizer(make())
    ids = tokenizer.encode(TEXT)
    spelled = [token_bytes(tokenizer, token) for token in ids]
    assert b"".join(spelled).decode().removeprefix(" ") == TEXT
    assert any(len(one) == 1 and one[0] >= 0x80 for one in spelled)


@pytest.mark.parametrize("make", [sentencepiece, metaspace])
def test_a_space_in_front_tells_two_tokens_apart(make):
    tokenizer = Tokenizer(make())
    ids = map(tokenizer.backend.token_to_id, ("a", "▁a", "▁", "▁▁"))
    assert [token_bytes(tokenizer, token) for token in ids] == [b"a", b" a", b" ", b"  "]


def test_all_bytes_of_a_byte_level_vocabulary_are_distinct():
    tokenizer = Tokenizer(byte_level(["<s>"]))
    found = {token_bytes(tokenizer, i) for i in range(tokenizer.backend.get_vocab_size())}
    assert found >= {bytes([byte]) for byte in range(256)} | {b"<s>"}


def test_names_are_texts_or_bytes():
    assert token_name("é".encode()) == "é"
    assert token_name(b"\xe2\x82") == r"bytes:\xe2\x82"
