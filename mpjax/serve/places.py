"""Text offsets of tokens: the number of characters before each token."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterable, Sequence

from mpjax.text.spelling import token_bytes
from mpjax.text.tokenizer import Tokenizer

BYTES = 4  # of the longest character


class Places:
    """The text offsets of streamed tokens.

    context: earlier tokens, whose last character may be unfinished. begin: the offset of the first
    new token.

    A token within a character has the offset of that character. A special token, which is not in
    the text, has the offset of the next token.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = (), begin: int = 0) -> None:
        self._pieces = _Pieces(tokenizer)
        self._hidden, self._at = tokenizer.hidden_ids, begin
        for token in context[1 - BYTES :]:
            self._pieces.next(token)

    def of(self, tokens: Iterable[int]) -> list[int]:
        """The offsets of the next tokens."""
        found = []
        for token in tokens:
            found.append(self._at)
            self._at += 0 if token in self._hidden else len(self._pieces.next(token))
        return found


def prompt_places(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[int]:
    """The offsets of a prompt's tokens in its text.

    Characters of tokens outside the text, such as a bos token that the tokenizer adds or
    SentencePiece's first space, don't count.
    """
    pieces = _Pieces(tokenizer)
    spelled = [pieces.next(token) for token in ids]
    before = max(0, ("".join(spelled) + pieces.rest()).find(text))
    ends = itertools.accumulate(map(len, spelled), initial=0)
    return [min(max(end - before, 0), len(text)) for end, _ in zip(ends, ids, strict=False)]


class _Pieces:
    """The characters that each token completes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, token: int) -> str:
        return self._decoder.decode(token_bytes(self._tokenizer, token))

    def rest(self) -> str:
        return self._decoder.decode(b"", final=True)
