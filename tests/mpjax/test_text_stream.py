from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpjax.tokenizer import Tokenizer
from tests.mpjax.tokenizer_folders import TEXTS, byte_level, metaspace, sentencepiece

BACKENDS = {
    "byte level": byte_level(["<s>", "</s>"], 300),
    "sentencepiece": sentencepiece(),
    "metaspace": metaspace(),
}
TOKENIZERS = {name: Tokenizer(backend) for name, backend in BACKENDS.items()}


def cut(ids, sizes):
    """Ids in chunks of the given sizes, the rest one by one."""
    chunks = []
    for size in sizes:
        chunks.append(ids[:size])
        ids = ids[size:]
    return chunks + [[index] for index in ids]


def streamed(tokenizer, chunks, skip_special=True):
    stream = tokenizer.stream(skip_special)
    return [stream.push(chunk) for chunk in chunks], stream.finish()


SIZES = st.lists(st.integers(0, 5), max_size=12)
UNICODE = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(" aabé日👩")))


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=UNICODE, sizes=SIZES)
@settings(max_examples=100)
def test_streamed_text_is_the_decoded_text(name, text, sizes):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    pieces, rest = streamed(tokenizer, cut(ids, sizes))
    assert "".join(pieces) + rest == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces)  # no half characters


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), sizes=SIZES, skip_special=st.booleans())
@settings(max_examples=200)
def test_streamed_ids_are_the_decoded_ids_even_where_they_are_no_text(
    name, data, sizes, skip_special
):
    tokenizer = TOKENIZERS[name]
    size = tokenizer.backend.get_vocab_size()
    index = st.integers(0, size + 3) | st.integers(size - 13, size)  # the last ones are words
    ids = data.draw(st.lists(index, max_size=30))
    pieces, rest = streamed(tokenizer, cut(ids, sizes), skip_special)
    assert "".join(pieces) + rest == tokenizer.decode(ids, skip_special)


def test_a_stream_gives_text_out_as_soon_as_it_is_certain():
    tokenizer = TOKENIZERS["byte level"]
    text = "The capital of Fran"
    pieces, rest = streamed(tokenizer, [[index] for index in tokenizer.encode(text)])
    assert pieces == [tokenizer.decode([index]) for index in tokenizer.encode(text)]
    assert rest == ""
    tokenizer = TOKENIZERS["sentencepiece"]
    pieces, rest = streamed(tokenizer, [[index] for index in tokenizer.encode("ab é a☃. c")])
    assert (pieces, rest) == (
        ["a", "b", " ", "é", " a", "", "", "", "☃.", " ", "c"],
        "",
    )


def test_a_stream_decodes_a_bounded_window():
    tokenizer = TOKENIZERS["byte level"]
    stream = tokenizer.stream()
    for index in tokenizer.encode(TEXTS[0] * 20):
        stream.push([index])
        assert len(stream._window) < 16


def test_a_finished_stream_starts_anew():
    tokenizer = TOKENIZERS["sentencepiece"]
    stream = tokenizer.stream()
    half = tokenizer.encode("☃")[:-1]
    for _ in range(2):
        assert stream.push(half) == ""
        assert stream.finish() == tokenizer.decode(half)
        assert stream.finish() == ""
