"""The text of one row while it is generated, and the stop strings that end it."""

from __future__ import annotations

from collections.abc import Sequence

from mpjax.text_stream import TextStream
from mpjax.tokenizer import Tokenizer


class RowText:
    """A row's tokens and text so far.

    prompt: the ids in front, which decide how the text begins. stop: strings that end the row, and
        its text before them, where they come to their end with token number `minimum` or later.

    tokens: ids of the row. text: what they say so far, without a stop string that has ended it.
    stopped: whether one has. ended: whether no more text can come.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str], minimum: int = 0
    ) -> None:
        self._stream: TextStream = tokenizer.stream(context=prompt)
        self._stop, self._minimum = stop, minimum
        self._taken = 0  # characters
        self.tokens: list[int] = []
        self.text = ""
        self.stopped = self.ended = False

    def push(self, tokens: Sequence[int]) -> None:
        """Takes the row's next tokens; none after a stop string."""
        for token in tokens:
            if self.stopped:
                return
            self.tokens.append(token)
            self._extend(self._stream.push([token]))

    def finish(self) -> None:
        """Ends the row: what its last tokens say is text as it is."""
        if not self.ended:
            self._extend(self._stream.finish())
            self.ended = True

    def take(self) -> str:
        """The text that is certain and was not taken before."""
        certain = self.text[: len(self.text) - self._uncertain()]
        piece, self._taken = certain[self._taken :], len(certain)
        return piece

    def _uncertain(self) -> int:
        """Characters at the end of the text that may turn out to begin a stop string."""
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
        # A string that came to its end in what was known did so before the minimum.
        found = (self.text.find(string, max(0, known + 1 - len(string))) for string in self._stop)
        if ends := [at for at in found if at >= 0]:
            self.text = self.text[: min(ends)]
            self.stopped = self.ended = True
