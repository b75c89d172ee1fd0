"""Text of one row while it is generated, and the stop strings that end it."""

from __future__ import annotations

from collections.abc import Sequence

from mpjax.text.text_stream import TextStream
from mpjax.text.tokenizer import Tokenizer


class RowText:
    """A row's new tokens and their text so far.

    prompt: the ids before the row's; whether the text begins with a space can depend on them.
    stop: strings that end the row; its text then ends before the string.
    minimum: stop strings that are complete before token number `minimum` don't count.

    Attributes:
      tokens: ids of the row's new tokens.
      text: their text, without a stop string that has ended the row.
      marker_places: the character offsets of the markers of reasoning and tool calls that the model
        wrote as single tokens.
      stopped: whether a stop string has ended the row.
      ended: whether no more text can come.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str], minimum: int = 0
    ) -> None:
        self._tokenizer, self._prompt = tokenizer, prompt
        self._markers = tokenizer.style.tokens
        self._stop, self._minimum = stop, minimum
        self.restart()

    def restart(self) -> None:
        """Forgets all new tokens."""
        self._stream: TextStream = self._tokenizer.stream(context=self._prompt)
        self._taken = 0  # characters that `take` has returned
        self.tokens: list[int] = []
        self.text = ""
        self.marker_places: set[int] = set()
        self.stopped = self.ended = False

    def push(self, tokens: Sequence[int]) -> None:
        """Adds the row's next tokens, up to the one that completes a stop string."""
        for token in tokens:
            if self.stopped:
                return
            self.tokens.append(token)
            piece = self._stream.push([token])
            if (marker := self._markers.get(token)) is not None and piece.endswith(marker):
                self.marker_places.add(len(self.text) + len(piece) - len(marker))
            self._extend(piece)

    def finish(self) -> None:
        """Ends the row; bytes that the text stream has held back are added to the text."""
        if not self.ended:
            self._extend(self._stream.finish())
            self.ended = True

    def take(self) -> str:
        """The text that `take` has not returned before and that can't become a stop string."""
        certain = self.text[: len(self.text) - self._uncertain()]
        piece, self._taken = certain[self._taken :], len(certain)
        return piece

    def _uncertain(self) -> int:
        """Number of characters at the end of the text that may begin a stop string."""
        if self.ended:
            return 0
        return max(
            (
                size
                for string in self._stop
                for size in range(1, len(string))
                if self.text.endswith(string[:size])
            ),
            default=0,
        )

    def _extend(self, piece: str) -> None:
        known = len(self.text)
        self.text += piece
        if len(self.tokens) < self._minimum:
            return
        # A string that lies in the text before this piece was complete before the minimum.
        found = (self.text.find(string, max(0, known + 1 - len(string))) for string in self._stop)
        if ends := [at for at in found if at >= 0]:
            self.text = self.text[: min(ends)]
            self.stopped = self.ended = True
