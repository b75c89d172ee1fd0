"""Calibration text as batches of windows of tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from mpjax.arguments import require_documents
from mpjax.evaluation.windows import first_pieces
from mpjax.kernels.checks import whole_number
from mpjax.models import DecoderConfig
from mpjax.text.tokenizer import Tokenizer


class Windows(NamedTuple):
    """A batch of windows of tokens.

    tokens: int32 [batch, window]. is_real: bool [batch, window], False for padding, on the right.
    """

    tokens: np.ndarray
    is_real: np.ndarray


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The amount of calibration text, and its division into windows.

    window: tokens of a window, at most the model's positions. Each window has an empty context.
        tokens: the most tokens of all documents together. batch: the number of windows in a batch.
    """

    window: int = 2048
    tokens: int = 128 * 2048
    batch: int = 4

    def __post_init__(self) -> None:
        for name in ("window", "tokens", "batch"):
            object.__setattr__(
                self, name, whole_number(f"Calibration: {name}", getattr(self, name))
            )

    def windows(
        self, documents: Iterable[str], tokenizer: Tokenizer, config: DecoderConfig
    ) -> list[Windows]:
        """The beginning of the documents as batches of windows; a window is of one document.

        All batches have one shape, with `batch` windows, or fewer if there are fewer in total.

        Raises ValueError for documents that are not a list or have no token, and for another
        model's tokenizer.
        """
        require_documents(documents)
        window = min(self.window, config.max_position_embeddings)
        found = first_pieces(
            tokenizer, documents, config.vocab_size, window=window, most=self.tokens
        )
        pieces = [ids for _, ids in found]
        if not pieces:
            raise ValueError("there is nothing to calibrate on: the documents are empty")
        return list(_batches(pieces, max(map(len, pieces)), min(self.batch, len(pieces))))


DEFAULT_CALIBRATION = Calibration()


def _batches(pieces: list[list[int]], longest: int, batch: int) -> Iterator[Windows]:
    """Batches [batch, longest]; short windows and the last batch are padded."""
    for first in range(0, len(pieces), batch):
        tokens = np.zeros((batch, longest), np.int32)
        is_real = np.zeros((batch, longest), bool)
        for row, ids in enumerate(pieces[first : first + batch]):
            tokens[row, : len(ids)] = ids
            is_real[row, : len(ids)] = True
        yield Windows(tokens, is_real)
