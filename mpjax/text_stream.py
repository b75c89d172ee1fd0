"""Decodes token ids that arrive a few at a time to pieces of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpjax.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT = 8  # ids of the context that are kept: more than the bytes of a character


class TextStream:
    """Turns ids that arrive a few at a time into pieces of text.

    The pieces joined are exactly `Tokenizer.decode` of all ids, and no piece ends within a
    character: text that later ids could change is held back until they arrive, or until `finish`.

    skip_special: whether special tokens have no text.
    context: ids in front, such as a prompt's, whose text is known already. The pieces joined are
        then the text that the ids add to `Tokenizer.decode` of the context: a SentencePiece "▁"
        keeps its space, and a character that the context leaves unfinished comes whole. After a
        skipped special token, as at the end of a chat template's header, the context is dropped.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special: bool = True, context: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        # A few ids of context, then the ids that have not been turned into text.
        self._window: list[int] = []
        self._run = 0  # number of byte-fallback tokens at the window's end
        self._append(self._end(context))
        # Number of characters of the window's text that are known already, and the number of those,
        # at their end, that later ids may change: U+FFFD instead of an unfinished character.
        self._emitted = len(self._decode(self._window))
        self._unfinished = self._emitted - self._certain(self._window)

    def push(self, ids: Iterable[int]) -> str:
        """Adds the next ids; returns the text that later ids can't change, often a token late."""
        self._append(i for i in map(int, ids) if self._has_text(i))
        # One invalid byte turns its whole run of byte-fallback tokens into U+FFFD, so the text of a
        # run is certain only when the run has ended.
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
        """Returns the rest of the text, unfinished characters as U+FFFD, and empties the stream.

        The stream can be used again, without a context.
        """
        text = self._decode(self._window)
        piece = text[self._begin(text) :]
        self._window, self._run, self._emitted, self._unfinished = [], 0, 0, 0
        return piece

    def _append(self, ids: Iterable[int]) -> None:
        for index in ids:
            self._window.append(index)
            self._run = self._run + 1 if index in self._tokenizer.byte_ids else 0

    def _begin(self, text: str) -> int:
        """Index in the window's text of the first character that was not known before."""
        begin = self._emitted - self._unfinished
        while begin < self._emitted and text[begin : begin + 1] == REPLACEMENT:
            begin += 1  # the later ids have not changed it
        return begin

    def _shorten_window(self, complete: int) -> None:
        # Drops ids whose text is certain. Decoders treat the first token differently (a
        # SentencePiece "▁" loses its space), so the last ids with text stay in front of later ones.
        start, context = complete, ""
        while start and not context:
            start -= 1
            context = self._decode(self._window[start:complete])
        self._window, self._emitted = self._window[start:], len(context)
        self._unfinished = 0

    def _cut_window(self, text: str, complete: int) -> None:
        # Drops old ids of a long window that never becomes certain, such as bytes that are not
        # UTF-8. The cut is made only if the rest still decodes to the same text, except for the
        # character in which the cut lies: at most three bytes, so three U+FFFD.
        start = complete - 2 * CONTEXT
        kept = self._decode(self._window[start:complete])
        if kept[3:] and text.endswith(kept[3:]):
            self._window = self._window[start:]
            self._emitted += len(kept) - len(text)

    def _end(self, context: Sequence[int]) -> list[int]:
        """The last ids of a context: as many as the text of later ids can depend on."""
        end: list[int] = []
        for index in map(int, reversed(context)):
            # A window that begins within a character would turn the run of bytes into U+FFFD.
            within = end and 0x80 <= self._tokenizer.byte_ids.get(end[0], 0) < 0xC0
            if len(end) >= CONTEXT and not within and self._decode(end):
                break
            if self._skip_special and index in self._tokenizer.special_ids:
                break
            if self._has_text(index):
                end.insert(0, index)
        return end

    def _certain(self, ids: list[int]) -> int:
        """Number of characters of the ids' text that later ids can't change."""
        text = whole = self._decode(ids)
        # An unfinished character turns its whole run of byte-fallback tokens into U+FFFD. Without
        # its bytes, three at most, the run decodes to its finished characters.
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
