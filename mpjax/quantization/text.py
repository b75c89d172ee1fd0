"""The text for calibration, as batches of windows of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from mpjax.arguments import require_documents
from mpjax.tokenizer import Tokenizer
from mpjax.windows import first_pieces


class Windows(NamedTuple):
    """A batch of windows of tokens.

    tokens: int32 [batch, window]. is_real: bool [batch, window], False for padding, on the right.
    """

    tokens: np.ndarray
    is_real: np.ndarray


def windows_of(
    documents: Iterable[str],
    tokenizer: Tokenizer,
    vocabulary: int,
    *,
    window: int,
    most: int,
    batch: int,
) -> list[Windows]:
    """The first `most` tokens of documents, in windows of at most `window` tokens.

    A window holds tokens of one document, and is read without what comes before it. Batches have
    `batch` windows, or all if there are fewer, and one shape.

    Raises ValueError for documents that are no list, or have no token, and for a tokenizer of
    another model.
    """
    require_documents(documents)
    found = first_pieces(tokenizer, documents, vocabulary, window=window, most=most)
    pieces = [ids for _, ids in found]
    if not pieces:
        raise ValueError("there is nothing to calibrate on: the documents are empty")
    longest = max(map(len, pieces))
    batch = min(batch, len(pieces))
    return list(_batches(pieces, longest, batch))


def _batches(pieces: list[list[int]], longest: int, batch: int) -> Iterator[Windows]:
    """Batches [batch, longest]; short windows, and the last batch, are filled with padding."""
    for first in range(0, len(pieces), batch):
        tokens = np.zeros((batch, longest), np.int32)
        is_real = np.zeros((batch, longest), bool)
        for row, ids in enumerate(pieces[first : first + batch]):
            tokens[row, : len(ids)] = ids
            is_real[row, : len(ids)] = True
        yield Windows(tokens, is_real)
