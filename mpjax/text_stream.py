"""Text of token ids that arrive a few at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpjax.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT = 8  # ids of a context that are kept: more than the bytes of a character


class TextStream:
    """Turns ids that arrive a few at a time into pieces of text.

    The pieces joined are exactly `Tokenizer.decode` of all the ids, and none ends within a
    character: what later ids could still change is held back until they arrive, or `finish`.

    context: ids in front, a prompt's, whose text is known already: the pieces are then what
        `Tokenizer.decode` of all adds to that of the context, so that a SentencePiece "▁" keeps
        its space, and a character that the context left unfinished comes whole. After a special
        token that is skipped, as at the end of a chat template's header, text begins anew.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special: bool = True, context: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        # A little context, then the ids not yet turned into text.
        self._window: list[int] = []
        self._run = 0  # byte-fallback tokens at its end
        self._append(self._end(context))
        # Characters of the window's text that are known already, and how many of these, the last
        # ones, ids to come may change: U+FFFD in the place of a character that is not finished.
        self._emitted = len(self._decode(self._window))
        self._unfinished = self._emitted - self._certain(self._window)

    def push(self, ids: Iterable[int]) -> str:
        """Take the next ids; return the text that is now certain, often a token or so late."""
        self._append(i for i in map(int, ids) if self._has_text(i))
        # One invalid byte makes byte-fallback tokens all U+FFFD, back to the start of their run:
        # a run is certain when it has ended.
        complete = len(self._window) - self._run
        text = self._decode(self._window[:complete])
        # A byte-level decoder shows the start of an unfinished character as one U+FFFD at the end.
        certain = len(text) - text.endswith(REPLACEMENT)
        piece = text[self._begin(text) : certain]
        if certain == len(text) and certain >= self._emitted:
            self._shorten_window(complete)
        elif piece:
            self._emitted, self._unfinished = certain, 0
            if complete > 4 * CONTEXT:
                self._cut_window(text, complete)
        return piece

    def finish(self) -> str:
        """The rest of the text, whole or not. The stream is then empty and can be used again."""
        text = self._decode(self._window)
        piece = text[self._begin(text) :]
        self._window, self._run, self._emitted, self._unfinished = [], 0, 0, 0
        return piece

    def _append(self, ids: Iterable[int]) -> None:
        for index in ids:
            self._window.append(index)
            self._run = self._run + 1 if index in self._tokenizer.byte_ids else 0

    def _begin(self, text: str) -> int:
        """Where, in the window's text, that begins which was not known before."""
        begin = self._emitted - self._unfinished
        while begin < self._emitted and text[begin : begin + 1] == REPLACEMENT:
            begin += 1  # as it was
        return begin

    def _shorten_window(self, complete: int) -> None:
        # Decoders treat the first token apart (a SentencePiece "▁" loses its space there), so one
        # that has text stays in front of what is to come.
        start, context = complete, ""
        while start and not context:
            start -= 1
            context = self._decode(self._window[start:complete])
        self._window, self._emitted = self._window[start:], len(context)
        self._unfinished = 0

    def _cut_window(self, text: str, complete: int) -> None:
        # Of bytes that are no text the last may always be unfinished. A cut must not change how the
        # rest is read, but for what is left of a character in which it is: three bytes at most.
        start = complete - 2 * CONTEXT
        kept = self._decode(self._window[start:complete])
        if kept[3:] and text.endswith(kept[3:]):
            self._window = self._window[start:]
            self._emitted += len(kept) - len(text)

    def _end(self, context: Sequence[int]) -> list[int]:
        """The last ids of a context, as many as what follows can depend on."""
        end: list[int] = []
        for index in map(int, reversed(context)):
            # Bytes from within a character would spoil the run that they begin.
            within = end and 0x80 <= self._tokenizer.byte_ids.get(end[0], 0) < 0xC0
            if len(end) >= CONTEXT and not within and self._decode(end):
                break
            if self._skip_special and index in self._tokenizer.special_ids:
                break
            if self._has_text(index):
                end.insert(0, index)
        return end

    def _certain(self, ids: list[int]) -> int:
        """Characters of a context that no id to come may change."""
        text = whole = self._decode(ids)
        # A character's first bytes make all of a run of byte-fallback tokens U+FFFD.
        for last in range(len(ids) - 1, max(len(ids) - 4, -1), -1):
            if not whole.endswith(REPLACEMENT) or ids[last] not in self._tokenizer.byte_ids:
                break
            whole = self._decode(ids[:last])
        return len(text.rstrip(REPLACEMENT) if whole.endswith(REPLACEMENT) else whole)

    def _has_text(self, index: int) -> bool:
        if self._skip_special and index in self._tokenizer.special_ids:
            return False
        return self._tokenizer.backend.id_to_token(index) is not None

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special)
