from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpjax.text.text_stream import TextStream
from mpjax.text.tokenizer import Tokenizer
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


class Counting(dict):
    looked_up = 0

    def __contains__(self, key):
        self.looked_up += 1
        return super().__contains__(key)


# Bytes that end where a character is unfinished: no text, and text of which each token has a part.
@pytest.mark.parametrize("name", ["byte level", "sentencepiece"])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("data", [b"\xf0", b"\xe2\x98", b"\x83", b"\x91\xa9\xf0\x9f", b"\xe2a"])
def test_what_is_no_text_takes_no_longer(name, size, data, monkeypatch):
    tokenizer, decoded, characters = TOKENIZERS[name], [], "☃👩a"
    names = {byte: f"<0x{byte:02X}>" for byte in range(256)}
    if name == "byte level":  # a character stands for each byte
        split = tokenizer.backend.pre_tokenizer.pre_tokenize_str(characters)
        names = dict(zip(characters.encode(), "".join(piece for piece, _ in split), strict=True))
    ids = [tokenizer.backend.token_to_id(names[byte]) for byte in data * 500]
    expected, decode = tokenizer.decode(ids), tokenizer.decode
    counting = Counting(tokenizer.byte_ids)
    monkeypatch.setattr(
        tokenizer, "decode", lambda ids, *rest: decoded.append(len(ids)) or decode(ids, *rest)
    )
    monkeypatch.setattr(tokenizer, "byte_ids", counting)
    pieces, rest = streamed(tokenizer, [ids[i : i + size] for i in range(0, len(ids), size)])
    assert "".join(pieces) + rest == expected
    assert sum(decoded) < 40 * len(ids)
    assert counting.looked_up < 3 * len(ids)


def test_a_finished_stream_starts_anew():
    tokenizer = TOKENIZERS["sentencepiece"]
    stream = tokenizer.stream()
    half = tokenizer.encode("☃")[:-1]
    for _ in range(2):
        assert stream.push(half) == ""
        assert stream.finish() == tokenizer.decode(half)
        assert stream.finish() == ""


def test_a_finished_stream_has_forgotten_the_bytes_of_a_character():
    tokenizer = TOKENIZERS["sentencepiece"]
    stream = tokenizer.stream()
    ids = tokenizer.encode("☃")[-3:]
    stream.push(ids[:1])
    assert stream.finish() == "\ufffd"
    assert [stream.push(ids[:2]), stream.push(ids[2:]), stream.finish()] == ["", "", "☃"]
    assert stream.push(tokenizer.encode("ab é a.")) + stream.finish() == "ab é a."
    letter = tokenizer.backend.token_to_id("<0x41>")  # it may yet be of a run that is no text
    assert (stream.push([letter]), stream.finish()) == ("", "A")


def continued(tokenizer, context, ids, skip_special=True):
    stream = tokenizer.stream(skip_special, context)
    return "".join([*(stream.push([index]) for index in ids), stream.finish()])


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=UNICODE.filter(lambda text: "\ufffd" not in text), data=st.data())
@settings(max_examples=100)
def test_after_a_context_a_stream_gives_what_all_adds_to_it(name, text, data):
    """Wherever the context ends; where it ends within a character, all of that is new."""
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    cut = data.draw(st.integers(0, len(ids)))
    whole = tokenizer.decode(ids)
    starts = [tokenizer.decode(ids[:end]).rstrip("\ufffd") for end in range(cut + 1)]
    known = max((start for start in starts if whole.startswith(start)), key=len)
    assert continued(tokenizer, ids[:cut], ids[cut:]) == whole[len(known) :]


def test_after_a_prompt_the_first_word_keeps_its_space():
    for name in ("sentencepiece", "metaspace"):
        tokenizer = TOKENIZERS[name]
        word = [tokenizer.backend.token_to_id("▁a")]
        assert continued(tokenizer, tokenizer.encode("ab é"), word) == " a"
        assert continued(tokenizer, tokenizer.encode("ab é" * 50), word) == " a"
        assert continued(tokenizer, [], word) == "a"
        # As at the end of a chat template's header; what is not skipped has a text of its own.
        after_special = [*tokenizer.encode("ab"), tokenizer.backend.token_to_id("</s>")]
        assert continued(tokenizer, after_special, word) == "a"
        assert continued(tokenizer, after_special, word, skip_special=False) == " a"
        assert continued(tokenizer, [*after_special, *tokenizer.encode("b")], word) == " a"
    tokenizer = TOKENIZERS["byte level"]
    assert continued(tokenizer, tokenizer.encode("The"), tokenizer.encode(" a")) == " a"


def test_a_character_that_a_context_began_comes_whole():
    for name in ("byte level", "sentencepiece"):
        tokenizer = TOKENIZERS[name]
        ids, more = tokenizer.encode("a☃"), tokenizer.encode("☃")[-1:]
        for cut in (1, 2):
            stream = tokenizer.stream(context=ids[:-cut])
            assert [stream.push([index]) for index in ids[-cut:-1]] == [""] * (cut - 1)
            assert stream.push(ids[-1:]) + stream.finish() == "☃"
            assert continued(tokenizer, ids[:-cut], tokenizer.encode("b")[-1:]) == "b"
        # One that the prompt wrote is no unfinished one; nor can it be taken back.
        assert continued(tokenizer, tokenizer.encode("a\ufffd"), tokenizer.encode("b")[-1:]) == "b"
        assert set(continued(tokenizer, ids, more)) == {"\ufffd"}


@pytest.mark.parametrize("character", ["\x80", "¿", "à", "日"])
def test_a_long_context_is_cut_between_characters(character):
    """The characters' last bytes are the lowest and highest continuation bytes, and between."""
    tokenizer = TOKENIZERS["sentencepiece"]
    ids, size = tokenizer.encode(character * 10 + "a"), len(character.encode())
    for new in range(size + 1):  # bytes
        context, more = ids[: -new - 1], ids[-new - 1 :]
        assert continued(tokenizer, context, more) == character * (new > 0) + "a"


def test_a_stream_skips_special_tokens_unless_it_is_told_not_to():
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = [tokenizer.backend.token_to_id(name) for name in ("</s>", "ab")]
    for options, expected in (({}, "ab"), ({"skip_special": False}, "</s>ab")):
        assert TextStream(tokenizer, **options).push(ids) == expected


def test_a_long_context_is_not_decoded(monkeypatch):
    tokenizer = TOKENIZERS["sentencepiece"]
    decoded = []
    decode = tokenizer.decode
    monkeypatch.setattr(
        tokenizer, "decode", lambda ids, *rest: decoded.append(len(ids)) or decode(ids, *rest)
    )
    context, more = tokenizer.encode("日本" * 5000), tokenizer.encode("日")[-3:]
    assert continued(tokenizer, context, more) == "日"
    assert max(decoded) < 16
