"""Text of token ids that arrive a few at a time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpjax.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Turns ids that arrive a few at a time into pieces of text.

    The pieces joined are exactly `Tokenizer.decode` of all the ids, and none ends within a
    character: what later ids could still change is held back until they arrive, or `finish`.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._window: list[int] = []  # a little context, then the ids not yet turned into text
        self._emitted = 0  # characters of the window's text that were given out already

    def push(self, ids: Iterable[int]) -> str:
        """Take the next ids; return the text that is now certain, often a token or so late."""
        self._window += [i for i in map(int, ids) if self._has_text(i)]
        # One invalid byte makes byte-fallback tokens all U+FFFD, back to the start of their run:
        # a run is certain when it has ended.
        complete = len(self._window)
        while complete and self._window[complete - 1] in self._tokenizer.byte_ids:
            complete -= 1
        text = self._decode(self._window[:complete])
        # A byte-level decoder shows the start of an unfinished character as one U+FFFD at the end.
        certain = len(text) - text.endswith(REPLACEMENT)
        piece = text[self._emitted : certain]
        if certain == len(text):
            self._shorten_window(complete)
        else:
            self._emitted = max(self._emitted, certain)
        return piece

    def finish(self) -> str:
        """The rest of the text, whole or not. The stream is then empty and can be used again."""
        piece = self._decode(self._window)[self._emitted :]
        self._window, self._emitted = [], 0
        return piece

    def _shorten_window(self, complete: int) -> None:
        # Decoders treat the first token apart (a SentencePiece "▁" loses its space there), so one
        # that has text stays in front of what is to come.
        start, context = complete, ""
        while start and not context:
            start -= 1
            context = self._decode(self._window[start:complete])
        self._window, self._emitted = self._window[start:], len(context)

    def _has_text(self, index: int) -> bool:
        if self._skip_special and index in self._tokenizer.special_ids:
            return False
        return self._tokenizer.backend.id_to_token(index) is not None

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special)
