"""Prompt look-up against a search in plain Python."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpjax
from mpjax.generation.speculation.ngram import continuation

pytestmark = pytest.mark.any_version

K, ROWS, SIZE = 4, 2, 12
compiled = jax.jit(continuation, static_argnums=(2, 3))


def expected(text: list[int], n: int) -> list[int] | None:
    """The next K tokens if what follows the last match went on, or None without a match."""
    for begin in range(len(text) - n - 1, -1, -1):
        if len(text) > n and text[begin : begin + n] == text[-n:]:
            written = list(text)
            for place in range(begin + n, begin + n + K):
                written.append(written[place])
            return written[len(text) :]
    return None


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=SIZE), min_size=2, max_size=2))
def test_it_copies_what_followed_the_most_recent_match(texts):
    history = np.zeros((ROWS, SIZE), np.int32)  # behind a text are zeros, which must not match
    for row, text in zip(history, texts, strict=True):
        row[: len(text)] = text
    for n in (1, 3):
        tokens, is_found = compiled(history, np.array([*map(len, texts)], np.int32), n, K)
        for row, text in enumerate(texts):
            wanted = expected(text, n)
            assert is_found[row] == (wanted is not None)
            assert wanted is None or tokens[row].tolist() == wanted


def test_a_history_shorter_than_n_has_no_match():
    tokens, is_found = continuation(np.ones((1, 3), np.int32), np.array([3]), 3, K)
    assert tokens.shape == (1, K)
    assert not is_found.any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "Ngram: k is 0: expected a whole number from 1 to 32"),
        ({"k": 4.0}, r"Ngram: k is .*4\.0.*: expected a whole number"),
        ({"n": 17}, "Ngram: n is 17: expected a whole number from 1 to 16"),
        ({"n": True}, "Ngram: n is"),
    ],
)
def test_other_numbers_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        mpjax.Ngram(**options)


def test_it_is_static():
    """Two of the same numbers share a compiled program."""
    assert jax.tree.leaves(mpjax.Ngram()) == []
    assert jax.tree.structure(mpjax.Ngram(np.int64(4), 3)) == jax.tree.structure(mpjax.Ngram())
