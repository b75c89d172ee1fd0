from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from mpjax.text.row_text import RowText
from mpjax.text.tokenizer import Tokenizer
from tests.mpjax.tokenizer_folders import byte_level

LETTERS = Tokenizer(byte_level([], 256))  # a token for each letter
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def read(row, text):
    """The pieces that a row gives out when it gets a text letter by letter."""
    pieces = []
    for token in LETTERS.encode(text):
        row.push([token])
        pieces.append(row.take())
    row.finish()
    return [*pieces, row.take()]


@given(text=st.text("ab", max_size=30), stops=STOPS, minimum=st.integers(0, 12))
def test_a_row_ends_where_a_stop_string_first_came_to_its_end_after_the_minimum(
    text, stops, minimum
):
    row = RowText(LETTERS, [], stops, minimum)
    pieces = read(row, text)
    counts = range(max(minimum, 1), len(text) + 1)
    end = next((n for n in counts if text[:n].endswith(tuple(stops))), None)
    assert (row.stopped, row.ended) == (end is not None, True)
    assert len(row.tokens) == (len(text) if end is None else end)
    starts = [end - len(stop) for stop in stops if end and text[:end].endswith(stop)]
    assert row.text == "".join(pieces) == (text[: min(starts)] if starts else text)


@given(text=st.text("ab", max_size=30), stops=STOPS)
def test_without_minimum_it_is_the_first_of_all(text, stops):
    row = RowText(LETTERS, [], stops)
    row.push(LETTERS.encode(text))
    row.finish()
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    read = text[: min(ends)] if ends else text
    starts = [read.index(stop) for stop in stops if stop in read]
    assert row.text == (read[: min(starts)] if starts else text)
    assert row.stopped == bool(ends)
    assert len(row.tokens) == len(read)


def test_what_may_become_a_stop_string_is_held_back():
    assert read(RowText(LETTERS, [], ["abc", "xy"]), "abxab") == ["", "", "ab", "x", "", "ab"]
    row = RowText(LETTERS, [], ["abc"])
    assert read(row, "zabcd") == ["z", "", "", "", "", ""]
    assert row.text == "z"


def test_a_stop_string_before_the_minimum_is_text():
    row = RowText(LETTERS, [], ["ab"], minimum=5)
    assert "".join(read(row, "abababab")) == "abab"
    assert len(row.tokens) == 6
    row = RowText(LETTERS, [], ["ab"], minimum=6)
    assert "".join(read(row, "abababab")) == "abab"  # it came to its end with the sixth


@pytest.mark.parametrize("minimum", [0, 60])
def test_no_text_is_searched_twice_for_stop_strings(minimum):
    class Text(str):
        """Records where searches in it begin, and what is added to it is one, too."""

        searched: list[tuple[int, int]] = []  # noqa: RUF012 (of all of them)

        def find(self, string, *begin):
            self.searched.append((len(self), *begin))
            return super().find(string, *begin)

        def __add__(self, other):
            return Text(super().__add__(other))

    Text.searched.clear()
    row = RowText(LETTERS, [], ["ba", "bbb"], minimum)
    row.text = Text()
    row.push(LETTERS.encode("a" * 50))
    assert len(Text.searched) == (0 if minimum else 100)
    assert all(length - begin <= 3 for length, begin in Text.searched)


def test_a_row_takes_nothing_after_its_end():
    row = RowText(LETTERS, [], ["b"])
    row.push(LETTERS.encode("abaa"))
    row.push(LETTERS.encode("a"))
    row.finish()
    assert (row.text, len(row.tokens), row.take(), row.take()) == ("a", 2, "a", "")


def test_places_of_markers_are_those_of_tokens():
    """The same characters in other tokens, as in an answer about the format, are no marker."""
    backend = byte_level(["<eos>"])
    backend.add_tokens([tokenizers.AddedToken("<tool_call>")])
    template = '{{ tools }}<tool_call>\\n{"name": ...}'
    tokenizer = Tokenizer(backend, chat_templates={"default": template})
    marker = backend.token_to_id("<tool_call>")
    assert tokenizer.style.tokens == {marker: "<tool_call>"}
    typed = [*tokenizer.encode("é <tool"), *tokenizer.encode("_call>")]
    assert marker not in typed
    row = RowText(tokenizer, [], ["now"])
    row.push([*typed, tokenizer.encode("é")[0], marker, marker, *typed])
    row.finish()
    text = "é <tool_call>"
    assert row.text == text + "\N{REPLACEMENT CHARACTER}<tool_call><tool_call>" + text
    assert row.marker_places == {len(text) + 1, len(text) + 1 + len("<tool_call>")}
