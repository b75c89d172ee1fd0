"""Cuts texts into windows of tokens, and defines which tokens of each are predicted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mpjax.arguments import require_known_ids
from mpjax.text.tokenizer import Tokenizer


class Window(NamedTuple):
    """A window: tokens that start with an empty context.

    tokens: int32 [tokens]. first: the index of the first predicted token, at least 1.
    """

    tokens: np.ndarray
    first: int

    @property
    def predicted(self) -> int:
        """The number of predicted tokens."""
        return max(len(self.tokens) - self.first, 0)


class Cut(NamedTuple):
    """Texts cut into windows.

    window: the most tokens of a window, not counting a bos token or the repeated last token of the
    previous window. stride: see `joined`; None for separate documents. text_bytes: the UTF-8 bytes
    of the predicted text.
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

    Yields pairs of the document's index and a piece. Blank documents are skipped. Raises ValueError
    for token ids outside the vocabulary.
    """
    for number, text in enumerate(documents):
        ids = document_tokens(tokenizer, text)[:most]  # raises ValueError if it is not a str
        if not text.strip():
            continue
        require_known_ids([ids], vocabulary)
        most -= len(ids)
        for begin in range(0, len(ids), window):
            yield number, ids[begin : begin + window]
        if most == 0:
            return


def apart(tokenizer: Tokenizer, documents: Iterable[str], window: int) -> list[Window]:
    """Windows of separate documents, in which every token except bos is predicted once.

    Each further window of a document begins with the last token of the previous one. A prediction
    depends on at most `window` tokens.
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

    Each window has `window` tokens and begins `stride` tokens after the previous one. It predicts
    its tokens that no earlier window predicted, and never its first token. Tokens after the last
    whole window are left out, unless the text is shorter than a window. With a stride of `window`
    this is the measure of GPTQ and AWQ; with a shorter stride, predictions depend on at least
    `window − stride` tokens.
    """
    ids = np.asarray(tokenizer.encode("\n\n".join(documents)), np.int32)
    return list(_overlapping(ids, window, stride))


def _overlapping(ids: np.ndarray, window: int, stride: int) -> Iterator[Window]:
    yield Window(ids[:window], 1)
    for begin in range(stride, len(ids) - window + 1, stride):
        yield Window(ids[begin : begin + window], max(window - stride, 1))
