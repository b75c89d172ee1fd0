"""Reads the symbols of a streamed answer, one at a time, and with a way back.

Symbols are characters, and markers that the model wrote as single tokens. If a marker is a token of
the vocabulary, the same characters from other tokens are text.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Generator, Iterable
from typing import Any

# A parser as a coroutine: each `yield` waits for the next symbol, or None at the end.
Reading = Generator[None, str | None, Any]
Say = Callable[[str], None]


class Marker(str):
    """A marker that the model wrote as a single token."""

    __slots__ = ()


@dataclasses.dataclass(frozen=True)
class Run:
    """A fast path: characters before the next match of `stops` go to `say` in one piece."""

    stops: re.Pattern[str]
    say: Say


class BrokenError(Exception):
    """The symbols are not a tool call."""


class EndedError(Exception):
    """The answer has ended."""


@functools.lru_cache(maxsize=256)
def any_of(characters: frozenset[str]) -> re.Pattern[str]:
    """A pattern that matches any of these characters."""
    return re.compile("|".join(map(re.escape, sorted(characters))) or "(?!)")


class SymbolReader:
    """Reads literal texts, words and markers from the symbols of an answer.

    tokens: the markers that are single tokens.

    Its methods are coroutines: each `yield` waits for the next symbol, or None at the end.
    """

    def __init__(self, tokens: Collection[str]) -> None:
        self._tokens = re.compile("|".join(map(re.escape, tokens)) or "(?!)")
        self._read: list[str] = []  # symbols that are not in parts yet
        self._again: list[str] = []  # symbols to read again, in reverse order
        self._run: Run | None = None

    def _next(self, run: Run | None = None) -> Reading:
        """The next symbol. run: the fast path for the characters before it."""
        symbol: str | None
        if self._again:
            symbol = self._again.pop()
        else:
            self._run = run
            symbol = yield
            self._run = None
        if symbol is None:
            raise EndedError
        self._read.append(symbol)
        return symbol

    def _visible(self) -> Reading:
        """The next symbol that is not white space."""
        while (symbol := (yield from self._next())).isspace():
            pass
        return symbol

    def _back(self, count: int) -> None:
        """Puts the last `count` symbols back, to be read again."""
        at = len(self._read) - count
        self._again += reversed(self._read[at:])
        del self._read[at:]

    def _accepts(self, literal: str, spaced: bool = True) -> Reading:
        """Whether a literal text comes next; if so, reads it. Its spaces may be missing.

        spaced: whether white space may precede it.
        """
        begin = len(self._read)
        symbol = (yield from self._visible() if spaced else self._next()) if literal else None
        for expected in self._symbols(literal):
            if symbol is None:
                symbol = yield from self._next()
            if symbol == expected:
                symbol = None
            elif not expected.isspace():
                self._back(len(self._read) - begin)
                return False
        if symbol is not None:
            self._back(1)
        return bool(literal)

    def _begins(self, literals: Iterable[str]) -> re.Pattern[str]:
        """Matches a first symbol of any literal text; leading spaces may be missing."""
        found = set()
        for literal in literals:
            for symbol in self._symbols(literal):
                found.add(symbol)
                if not symbol.isspace():
                    break
        return any_of(frozenset(symbol for symbol in found if not isinstance(symbol, Marker)))

    def _passed(self, say: Say) -> Say:
        """`say` for characters within a call: they also count as read."""

        def passed(text: str) -> None:
            self._read.append(text)
            say(text)

        return passed

    @functools.lru_cache(maxsize=32)  # noqa: B019 (a reader ends with its answer)
    def _symbols(self, literal: str) -> list[str]:
        """A literal text as symbols: characters and Markers."""
        found: list[str] = []
        at = 0
        for match in self._tokens.finditer(literal):
            found += [*literal[at : match.start()], Marker(match.group())]
            at = match.end()
        return [*found, *literal[at:]]

    def _require(self, literal: str) -> Reading:
        if literal and not (yield from self._accepts(literal)):
            raise BrokenError

    def _word(self, pattern: re.Pattern[str]) -> Reading:
        """The longest run of next symbols of which each matches the pattern."""
        found = ""
        while pattern.fullmatch(symbol := (yield from self._next())):
            found += symbol
        self._back(1)
        return found

    def _until(self, literal: str, say: Say) -> Reading:
        """Passes symbols to `say` up to a literal text, and reads that text."""
        run = Run(self._begins([literal]), self._passed(say))
        while True:
            yield from self._next(run)
            self._back(1)
            if (yield from self._accepts(literal, spaced=False)):
                return
            say((yield from self._next()))
