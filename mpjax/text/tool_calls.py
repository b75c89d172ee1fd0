"""Parses tool calls in a streamed answer.

An answer is a sequence of symbols: characters, and markers that the model wrote as single tokens.
If a marker is a token of the vocabulary, the same characters from other tokens are text.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import secrets
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from typing import Any, NamedTuple

from mpjax.text.tool_formats import AsJson, AsParameters, InObject, Quoted, ToolFormat
from mpjax.text.tool_schemas import PYTHONIC, as_json, is_text, no_json, property_of

NAME = re.compile(r"[A-Za-z0-9_.-]")  # a character of a tool's name
LETTER = re.compile(r"[A-Za-z0-9]")
QUOTES = re.compile(r'["\\]')
DEPTH = 64  # of nested values, since Python parses them by recursion

# A parser as a coroutine: each `yield` waits for the next symbol, or None at the end.
Reading = Generator[None, str | None, Any]
Say = Callable[[str], None]


class Marker(str):
    """A marker that the model wrote as a single token."""

    __slots__ = ()


class Part(NamedTuple):
    """A piece of an answer.

    kind: `text` or `reasoning`; `call`, which begins a call of the tool whose name is the text;
        `arguments`, more of the call's arguments in JSON; `end` of a complete call; or `broken`,
        the end of an incomplete call, whose text is everything that the model wrote of the call.
    id: of a call that begins. number: the index of the call among the answer's calls, from 0.
    """

    kind: str
    text: str
    id: str = ""
    number: int = 0


def merged(parts: Iterable[Part]) -> list[Part]:
    """The parts, with neighbours of one kind joined, except for Markers and ends of calls."""
    found: list[Part] = []
    for part in parts:
        before = found[-1] if found else Part("", "")
        is_same = (before.kind, before.number) == (part.kind, part.number)
        if is_same and part.text and Marker not in (type(before.text), type(part.text)):
            found[-1] = before._replace(text=before.text + part.text)
        else:
            found.append(part)
    return found


@dataclasses.dataclass(frozen=True)
class _Run:
    """A fast path: characters before the next match of `stops` go to `say` in one piece."""

    stops: re.Pattern[str]
    say: Say


class _BrokenError(Exception):
    """The symbols are not a tool call."""


class _EndedError(Exception):
    """The answer has ended."""


@functools.lru_cache(maxsize=256)
def _any_of(characters: frozenset[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(characters))) or "(?!)")


class CallReader:
    """Splits the text of an answer into text for the user and tool calls.

    tools: the schema of each tool's arguments, by its name; calls of other tools stay text.
    tokens: the markers that are single tokens; `push` gets them as Markers.
    """

    def __init__(
        self, format: ToolFormat, tools: Mapping[str, Mapping[str, Any]], tokens: Collection[str]
    ) -> None:
        self._format, self._tools = format, tools
        self._tokens = re.compile("|".join(map(re.escape, tokens)) or "(?!)")
        self._parts: list[Part] = []
        self._read: list[str] = []  # symbols that are not in parts yet
        self._again: list[str] = []  # symbols to read again, in reverse order
        self._space = ""  # white space that is text only if more text follows
        self._is_new = True  # whether the answer is only white space so far
        self._has_calls = self._is_inside = False
        self._has_begun = False  # whether a part `call` was added for the current call
        self._arguments: list[str] = []  # of the current call
        self._number = -1  # of the current call
        self._run: _Run | None = None
        self._machine: Reading = self._answer()
        next(self._machine)

    def push(self, piece: str) -> list[Part]:
        """Adds a string or a Marker of the answer; returns the parts that are certain."""
        if isinstance(piece, Marker):
            self._machine.send(piece)
            return self._taken()
        at = 0
        while at < len(piece):
            if self._run is not None:  # the fast path
                found = self._run.stops.search(piece, at)
                end = len(piece) if found is None else found.start()
                if end > at:
                    self._run.say(piece[at:end])
                    at = end
                    continue
            self._machine.send(piece[at])
            at += 1
        return self._taken()

    def finish(self) -> list[Part]:
        """The remaining parts, at the end of the answer; an unfinished call is broken."""
        for _ in self._machine:  # each iteration sends None
            pass
        return self._taken()

    def _taken(self) -> list[Part]:
        """The parts since the last call of `_taken`, joined."""
        parts, self._parts = self._parts, []
        return merged(parts)

    def _answer(self) -> Reading:
        """Parses a whole answer."""
        try:
            while True:
                yield from self._text()
                try:
                    yield from self._section()
                except _BrokenError:
                    self._give_up()
        except _EndedError:
            self._give_up()
            for symbol in reversed(self._again):
                self._say(symbol)
            if self._space and not self._has_calls:
                self._parts.append(Part("text", self._space))

    def _give_up(self) -> None:
        """Gives the symbols that were read back to the text, since they are not a call."""
        if self._has_begun:
            self._add("broken", "".join(self._read))
            self._has_begun = False
        elif self._read:  # any symbol but the first may begin another call
            self._say(self._read[0])
            self._again += reversed(self._read[1:])
        self._read.clear()

    def _say(self, symbol: str) -> None:
        """Adds text for the user. Trailing space is held back: around calls it is dropped."""
        text = self._space + symbol
        if shown := text.rstrip():
            self._parts.append(Part("text", shown))
            self._is_new = False
        self._space = text[len(shown) :]

    def _text(self) -> Reading:
        """Reads text up to a symbol that may begin a call, which stays to be read again."""
        format = self._format
        while True:
            openers = [format.begin.rstrip()]
            if not format.begin or format.opens_alone or self._is_inside:
                openers.append(format.open)
            bare = ["{"] if format.is_bare else []
            openers = list(filter(None, openers))
            yield from self._next(_Run(self._begins(openers + bare), self._say))
            self._back(1)
            if self._is_new:
                openers += bare
            for literal in openers:
                if (yield from self._accepts(literal, spaced=False)):
                    self._back(len(self._read))
                    return
            self._say((yield from self._next()))
            self._read.clear()

    def _section(self) -> Reading:
        """Parses one or more calls, up to the next text."""
        format = self._format
        self._is_inside |= yield from self._accepts(format.begin.rstrip())
        style = format.arguments
        in_object = isinstance(style, InObject)
        opener, marks = ("{", ",;]") if in_object else (format.open, [format.close])
        if in_object:
            yield from self._accepts("[")
        if not (yield from self._accepts(opener)):
            raise _BrokenError
        while True:
            yield from self._object(style) if isinstance(style, InObject) else self._call()
            for mark in marks:
                yield from self._drops(mark)
            if not (yield from self._accepts(opener)):
                break
        if (yield from self._drops(format.end)):
            self._is_inside = False

    def _drops(self, literal: str) -> Reading:
        """Whether a literal text comes next; if so, it is dropped from the answer."""
        found = yield from self._accepts(literal)
        if found:
            self._read.clear()
        return found

    def _next(self, run: _Run | None = None) -> Reading:
        """The next symbol. run: the fast path for the characters before it."""
        symbol: str | None
        if self._again:
            symbol = self._again.pop()
        else:
            self._run = run
            symbol = yield
            self._run = None
        if symbol is None:
            raise _EndedError
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
        return _any_of(frozenset(symbol for symbol in found if not isinstance(symbol, Marker)))

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
            raise _BrokenError

    def _word(self, pattern: re.Pattern[str]) -> Reading:
        """The longest run of next symbols of which each matches the pattern."""
        found = ""
        while pattern.fullmatch(symbol := (yield from self._next())):
            found += symbol
        self._back(1)
        return found

    def _add(self, kind: str, text: str, id: str = "") -> None:
        self._parts.append(Part(kind, text, id, self._number))

    def _begin(self, name: str, number: str = "") -> None:
        """Adds the part that begins a call. number: the call's id as the model wrote it, or ""."""
        if name not in self._tools:
            raise _BrokenError
        format = self._format
        random = secrets.token_hex(format.id_size)[: format.id_size]
        written = (format.identity or "{number}").format(name=name, number=number)
        self._number += 1
        self._add("call", name, written if number else f"{format.id_prefix}{random}")
        self._has_begun, self._arguments = True, []
        self._space = ""

    def _argue(self, text: str) -> None:
        self._add("arguments", text)
        self._arguments.append(text)

    def _end(self) -> None:
        """Ends a call, which is broken unless its arguments are a JSON object."""
        try:
            found = json.loads("".join(self._arguments), parse_constant=no_json)
        except (ValueError, RecursionError) as error:
            raise _BrokenError from error
        if not isinstance(found, dict):
            raise _BrokenError
        self._add("end", "")
        self._read.clear()
        self._has_begun, self._has_calls, self._is_new = False, True, False

    def _call(self) -> Reading:
        """Parses a call behind its opening marker."""
        format = self._format
        name = yield from self._word(NAME)
        has_number = yield from self._accepts(format.number)
        number = (yield from self._word(LETTER)) if has_number else ""
        yield from self._require(format.middle)
        self._begin(name, number)
        if isinstance(format.arguments, AsJson):
            yield from self._json(self._argue)
        elif isinstance(format.arguments, AsParameters):
            yield from self._parameters(format.arguments, self._tools[name])
        elif isinstance(format.arguments, Quoted):
            yield from self._require("{")
            yield from self._quoted_object(format.arguments.quote, DEPTH)
        self._end()

    def _object(self, style: InObject) -> Reading:
        """Parses a call that is a JSON object, behind its opening brace."""
        texts = {"name": "", "id": ""}
        held: list[str] = []  # arguments that come before the name
        end = yield from self._visible()
        while end != "}":
            key = yield from self._string(end)
            yield from self._require(":")
            if key in texts:
                texts[key] = yield from self._string((yield from self._visible()))
            elif key == style.key and texts["name"] and not self._has_begun:
                self._begin(texts["name"], texts["id"])
                yield from self._json(self._argue)
            else:
                yield from self._json(held.append if key == style.key else lambda _: None)
            if (end := (yield from self._visible())) == ",":
                end = yield from self._visible()
            elif end != "}":
                raise _BrokenError
        if not self._has_begun:
            self._begin(texts["name"], texts["id"])
            self._argue("".join(held) or "{}")
        self._end()

    def _string(self, quote: str) -> Reading:
        """The value of a JSON string. quote: its first symbol, already read."""
        if quote != '"':
            raise _BrokenError
        found: list[str] = ['"']
        yield from self._string_to(found.append)
        try:
            text: str = json.loads("".join(found), strict=False)
            text.encode()  # a lone surrogate is not valid text
        except ValueError as error:
            raise _BrokenError from error
        return text

    def _string_to(self, say: Say) -> Reading:
        """Passes a JSON string to `say`, behind its opening quote; Markers in it count as text."""
        run = _Run(QUOTES, self._passed(say))
        while (symbol := (yield from self._next(run))) != '"':
            say(symbol)
            if symbol == "\\":
                say((yield from self._next()))
        say(symbol)

    def _json(self, say: Say) -> Reading:
        """Passes a JSON value to `say` as it is written."""
        say(symbol := (yield from self._visible()))
        depth = 0
        while True:
            if isinstance(symbol, Marker):
                raise _BrokenError
            depth += (symbol in "{[") - (symbol in "}]")
            if symbol == '"':
                yield from self._string_to(say)
            if depth <= 0 and symbol in '"}]':
                return
            symbol = yield from self._next()
            if depth <= 0 and (symbol in ",}]" or symbol.isspace()):  # a number or a word has ended
                self._back(1)
                return
            say(symbol)

    def _parameters(self, style: AsParameters, schema: Mapping[str, Any]) -> Reading:
        """Parses arguments between markers, and the marker that ends the call."""
        before = "{"
        while not (yield from self._accepts(self._format.close)):
            yield from self._require(style.open)
            key: list[str] = []
            yield from self._until(style.middle, key.append)
            self._argue(f"{before}{json.dumps(''.join(key), ensure_ascii=False)}: ")
            before = ", "
            expected = property_of(schema, "".join(key))
            if is_text(expected):
                yield from self._text_until(style.close)
            else:
                written: list[str] = []
                yield from self._until(style.close, written.append)
                self._argue(as_json("".join(written), expected))
        self._argue("{}" if before == "{" else "}")

    def _until(self, literal: str, say: Say) -> Reading:
        """Passes symbols to `say` up to a literal text, and reads that text."""
        run = _Run(self._begins([literal]), self._passed(say))
        while True:
            yield from self._next(run)
            self._back(1)
            if (yield from self._accepts(literal, spaced=False)):
                return
            say((yield from self._next()))

    def _text_until(self, literal: str) -> Reading:
        """Adds the text before a literal to the arguments, as a JSON string."""
        self._argue('"')
        yield from self._until(
            literal, lambda symbol: self._argue(json.dumps(symbol, ensure_ascii=False)[1:-1])
        )
        self._argue('"')

    def _quoted_object(self, quote: str, depth: int) -> Reading:
        """Parses an object in Gemma's format, behind its opening brace."""
        before = "{"
        while not (yield from self._accepts("}")):
            if before != "{":
                yield from self._require(",")
            key: list[str] = []
            if not (yield from self._accepts(quote)):
                yield from self._until(":", key.append)
            else:  # Gemma may quote the keys of values
                yield from self._until(quote, key.append)
                yield from self._require(":")
            self._argue(f"{before}{json.dumps(''.join(key).strip(), ensure_ascii=False)}: ")
            before = ", "
            yield from self._quoted(quote, depth - 1)
        self._argue("{}" if before == "{" else "}")

    def _quoted(self, quote: str, depth: int) -> Reading:
        """Parses a value in Gemma's format."""
        if not depth:
            raise _BrokenError
        if (yield from self._accepts(quote)):
            yield from self._text_until(quote)
        elif (yield from self._accepts("{")):
            yield from self._quoted_object(quote, depth)
        elif (yield from self._accepts("[")):
            before = "["
            while not (yield from self._accepts("]")):
                if before != "[":
                    yield from self._require(",")
                self._argue(before)
                yield from self._quoted(quote, depth - 1)
                before = ", "
            self._argue("[]" if before == "[" else "]")
        else:
            word = yield from self._word(re.compile(r"[^,}\]\[{]"))
            self._argue(json.dumps(PYTHONIC[word]) if word in PYTHONIC else word)
