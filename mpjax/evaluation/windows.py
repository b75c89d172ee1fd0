"""Cuts texts into windows of tokens, in each of which a model predicts some of the tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mpjax.arguments import require_known_ids
from mpjax.text.tokenizer import Tokenizer


class Window(NamedTuple):
    """Tokens that are read from an empty context.

    tokens: int32 [tokens]. first: the index of the first token that is predicted, 1 or more.
    """

    tokens: np.ndarray
    first: int

    @property
    def predicted(self) -> int:
        """How many tokens are predicted."""
        return max(len(self.tokens) - self.first, 0)


class Cut(NamedTuple):
    """Texts that are cut into windows.

    window: the most tokens of each, without one that begins a document or repeats the last token
    before. stride: see `joined`; None where documents are apart. text_bytes: of what is predicted.
    """

    windows: list[Window]
    window: int
    stride: int | None
    text_bytes: int


def document_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a document, with the bos token (or the eos token without one) in front."""
    ids = tokenizer.encode(text)
    start = tokenizer.bos_id
    if start is None:
        start = tokenizer.backend.token_to_id(tokenizer.special_tokens.get("eos_token", ""))
    # Some checkpoints' tokenizers add the bos token themselves.
    return ids if start is None or ids[:1] == [start] else [start, *ids]


def first_pieces(
    tokenizer: Tokenizer, documents: Iterable[str], vocabulary: int, *, window: int, most: int
) -> Iterator[tuple[int, list[int]]]:
    """The first `most` tokens of documents, in pieces of at most `window`, for calibration.

    Each comes with the number of its document. Blank documents have none. Raises ValueError for
    token ids that a vocabulary of that size does not have.
    """
    for number, text in enumerate(documents):
        ids = document_tokens(tokenizer, text)[:most]  # raises ValueError for what is not a text
        if not text.strip():
            continue
        require_known_ids([ids], vocabulary)
        most -= len(ids)
        for begin in range(0, len(ids), window):
            yield number, ids[begin : begin + window]
        if most == 0:
            return


def apart(tokenizer: Tokenizer, documents: Iterable[str], window: int) -> list[Window]:
    """Windows of each document on its own, in which every token but bos is predicted once.

    A window after the first of a document begins with the last token of the window before. A
    prediction depends on `window` tokens at most.
    """
    windows = []
    for text in documents:
        ids = document_tokens(tokenizer, text)
        for begin in range(0, len(ids) - 1, window):
            windows.append(Window(np.asarray(ids[begin : begin + window + 1], np.int32), 1))
    return windows


def joined(
    tokenizer: Tokenizer, documents: Sequence[str], window: int, stride: int
) -> list[Window]:
    """Windows of the documents joined by empty lines, as papers measure perplexity.

    Each has `window` tokens, and begins `stride` tokens after the one before; it predicts those of
    its tokens that no window before it predicted, and never its first. Tokens after the last whole
    window are left out, unless the text is shorter than a window. With a stride of `window` this is
    the measure of GPTQ and AWQ; with a shorter one predictions depend on at least `window − stride`
    tokens.
    """
    ids = np.asarray(tokenizer.encode("\n\n".join(documents)), np.int32)
    return list(_overlapping(ids, window, stride))


def _overlapping(ids: np.ndarray, window: int, stride: int) -> Iterator[Window]:
    yield Window(ids[:window], 1)
    for begin in range(stride, len(ids) - window + 1, stride):
        yield Window(ids[begin : begin + window], max(window - stride, 1))
