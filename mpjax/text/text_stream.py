"""Decodes streamed token ids to pieces of text.

The text of an id depends on its neighbours: several ids may be the bytes of one character, and a
decoder drops the space of its first id. So the stream keeps a *window*: first some ids whose text
is known (the context), then the ids whose text is not certain yet. It decodes the whole window, and
returns the characters that are new and certain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpjax.text.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT = 8  # ids of the context that are kept: more than the bytes of a character


class TextStream:
    """Turns streamed token ids into pieces of text.

    The pieces joined are exactly `Tokenizer.decode` of all ids. No piece ends within a character:
    text that later ids could change is held back until they arrive, or until `finish`.

    skip_special: whether special tokens are left out of the text, except the markers of channels.
    context: ids before the first one, such as a prompt's, whose text the caller has already. The
        pieces joined are the text that the ids add to `Tokenizer.decode` of the context: a
        SentencePiece "▁" keeps its space, and a character that begins in the context comes whole.
        Only the ids after the context's last skipped special token count.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special: bool = True, context: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        # The ids that are decoded together: some context, then the ids without certain text.
        self._window: list[int] = []
        self._run = 0  # the number of byte-fallback tokens at the window's end
        self._append(self._end(context))
        # The number of characters of the window's text that the caller has. The last `_unfinished`
        # of them are U+FFFD instead of a character that later ids may complete; they occur
        # only after a context, since pieces hold such characters back.
        self._emitted = len(self._decode(self._window))
        self._unfinished = self._emitted - self._certain(self._window)

    def push(self, ids: Iterable[int]) -> str:
        """Adds the next ids; returns the new text that later ids can't change (may be empty)."""
        self._append(i for i in map(int, ids) if self._has_text(i))
        # Byte-fallback tokens, such as <0xE2>, are one byte each. One invalid byte turns the whole
        # run of them into U+FFFD, so the text of a run is certain only when the run has ended.
        complete = len(self._window) - self._run
        text = self._decode(self._window[:complete])
        # A byte-level decoder shows the start of an unfinished character as one U+FFFD at the end.
        certain = len(text) - text.endswith(REPLACEMENT)
        piece = text[self._begin(text) : certain]
        if certain == len(text) and certain >= self._emitted:
            self._shorten_window(complete)  # all decoded text is certain: its ids become context
        elif piece:
            self._emitted, self._unfinished = certain, 0
            if complete > 4 * CONTEXT:
                self._cut_window(text, complete)
        return piece

    def finish(self) -> str:
        """Returns the remaining text, unfinished characters as U+FFFD, and empties the stream.

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
        """The index in the window's text of the first character that the caller does not have."""
        begin = self._emitted - self._unfinished
        while begin < self._emitted and text[begin : begin + 1] == REPLACEMENT:
            begin += 1  # later ids have not completed this character: it stays U+FFFD
        return begin

    def _shorten_window(self, complete: int) -> None:
        """Drops ids whose text is certain, except for the last of them that have text.

        The ids that stay are the context of later ones: decoders treat the first token differently
        (a SentencePiece "▁" loses its space). complete: the number of ids whose text is certain.
        """
        start, context = complete, ""
        while start and not context:
            start -= 1
            context = self._decode(self._window[start:complete])
        self._window, self._emitted = self._window[start:], len(context)
        self._unfinished = 0

    def _cut_window(self, text: str, complete: int) -> None:
        """Drops old ids of a long window whose end stays uncertain, such as invalid UTF-8.

        text: of the first `complete` ids. They are cut only if the remaining ids decode to the same
        text, except for the character in which the cut lies: at most three bytes, so three U+FFFD.
        """
        start = complete - 2 * CONTEXT
        kept = self._decode(self._window[start:complete])
        if kept[3:] and text.endswith(kept[3:]):
            self._window = self._window[start:]
            self._emitted += len(kept) - len(text)

    def _end(self, context: Sequence[int]) -> list[int]:
        """The last ids of a context, as many as can affect the text of later ids."""
        end: list[int] = []
        for index in map(int, reversed(context)):
            # A window that began within a character would turn its bytes into U+FFFD, so the ids
            # of a UTF-8 continuation byte need the ids before them.
            within = end and 0x80 <= self._tokenizer.byte_ids.get(end[0], 0) < 0xC0
            if len(end) >= CONTEXT and not within and self._decode(end):
                break
            if self._skip_special and index in self._tokenizer.hidden_ids:
                break
            if self._has_text(index):
                end.insert(0, index)
        return end

    def _certain(self, ids: list[int]) -> int:
        """The number of characters of the ids' text that later ids can't change."""
        text = whole = self._decode(ids)
        # An unfinished character turns its whole run of byte-fallback tokens into U+FFFD. Without
        # its bytes, three at most, the run decodes to its finished characters.
        for last in range(len(ids) - 1, max(len(ids) - 4, -1), -1):
            if not whole.endswith(REPLACEMENT) or ids[last] not in self._tokenizer.byte_ids:
                break
            whole = self._decode(ids[:last])
        return len(text.rstrip(REPLACEMENT) if whole.endswith(REPLACEMENT) else whole)

    def _has_text(self, index: int) -> bool:
        if self._skip_special and index in self._tokenizer.hidden_ids:
            return False
        return self._tokenizer.backend.id_to_token(index) is not None

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special)
