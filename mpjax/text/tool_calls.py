"""Parses tool calls in a streamed answer.

An answer is a sequence of symbols: characters, and markers that the model wrote as single tokens.
If a marker is a token of the vocabulary, the same characters from other tokens are text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from mpjax.text.symbols import (
    BrokenError,
    EndedError,
    Marker,
    Reading,
    Run,
    Say,
    SymbolReader,
    any_of,
)
from mpjax.text.tool_formats import (
    AsJson,
    AsParameters,
    InObject,
    Pythonic,
    Quoted,
    ToolFormat,
)
from mpjax.text.tool_schemas import PYTHONIC, as_json, is_text, no_json, property_of

NAME = re.compile(r"[A-Za-z0-9_.-]")  # a character of a tool's name
LETTER = re.compile(r"[A-Za-z0-9]")
QUOTES = re.compile(r'["\\]')
KEY = re.compile(r"[^\s=,()]")  # a character of an argument's name in a call of Python
WORD = re.compile(r"[^\s,()\[\]{}:=]")  # a character of a number or a constant of Python
# Python's escapes: characters, and the number of hexadecimal digits.
ESCAPES = dict(zip("\\'\"abfnrtv/", "\\'\"\a\b\f\n\r\t\v/", strict=True))
DIGITS = {"x": 2, "u": 4, "U": 8}
DEPTH = 64  # of nested values, since Python parses them by recursion


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


class CallReader(SymbolReader):
    """Splits the text of an answer into text for the user and tool calls.

    tools: the schema of each tool's arguments, by its name; calls of other tools stay text.
    tokens: the markers that are single tokens; `push` gets them as Markers.
    """

    def __init__(
        self, format: ToolFormat, tools: Mapping[str, Mapping[str, Any]], tokens: Collection[str]
    ) -> None:
        self._format, self._tools = format, tools
        super().__init__(tokens)
        self._parts: list[Part] = []
        self._space = ""  # white space that is text only if more text follows
        self._is_new = True  # whether the answer is only white space so far
        self._has_calls = self._is_inside = False
        self._has_begun = False  # whether a part `call` was added for the current call
        self._arguments: list[str] = []  # of the current call
        self._number = -1  # of the current call
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
                except BrokenError:
                    self._give_up()
        except EndedError:
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
            first = "[" if isinstance(format.arguments, Pythonic) else "{"
            bare = [first] if format.is_bare else []
            openers = list(filter(None, openers))
            yield from self._next(Run(self._begins(openers + bare), self._say))
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
        if isinstance(style, Pythonic):
            yield from self._lines(style)
            return
        in_object = isinstance(style, InObject)
        opener, marks = ("{", ",;]") if in_object else (format.open, [format.close])
        if in_object:
            yield from self._accepts("[")
        if not (yield from self._accepts(opener)):
            raise BrokenError
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

    def _add(self, kind: str, text: str, id: str = "") -> None:
        self._parts.append(Part(kind, text, id, self._number))

    def _begin(self, name: str, number: str = "") -> None:
        """Adds the part that begins a call. number: the call's id as the model wrote it, or ""."""
        if name not in self._tools:
            raise BrokenError
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
            raise BrokenError from error
        if not isinstance(found, dict):
            raise BrokenError
        self._add("end", "")
        self._read.clear()
        self._has_begun, self._has_calls, self._is_new = False, True, False

    def _lines(self, style: Pythonic) -> Reading:
        """Parses calls of Python, in a list or on lines, behind the format's `begin`."""
        format = self._format
        if style.listed:
            yield from self._require("[")
        while True:
            yield from self._visible()
            self._back(1)
            name = yield from self._word(NAME)
            yield from self._require("(")
            self._begin(name)
            yield from self._pairs(")", "=", DEPTH)
            self._end()
            if style.listed:
                yield from self._drops(",")
            if (yield from self._drops("]" if style.listed else format.end)):
                break
        if not style.listed or (yield from self._drops(format.end)):
            self._is_inside = False

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
                raise BrokenError
        if not self._has_begun:
            self._begin(texts["name"], texts["id"])
            self._argue("".join(held) or "{}")
        self._end()

    def _string(self, quote: str) -> Reading:
        """The value of a JSON string. quote: its first symbol, already read."""
        if quote != '"':
            raise BrokenError
        found: list[str] = ['"']
        yield from self._string_to(found.append)
        try:
            text: str = json.loads("".join(found), strict=False)
            text.encode()  # a lone surrogate is not valid text
        except ValueError as error:
            raise BrokenError from error
        return text

    def _string_to(self, say: Say) -> Reading:
        """Passes a JSON string to `say`, behind its opening quote; Markers in it count as text."""
        run = Run(QUOTES, self._passed(say))
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
                raise BrokenError
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

    def _pairs(self, end: str, mark: str, depth: int) -> Reading:
        """Parses `key=value, ...` of a call, or `"key": value, ...` of a dictionary.

        end: the text behind all pairs. mark: between key and value.
        """
        before = "{"
        while not (yield from self._accepts(end)):
            if before != "{":
                yield from self._require(",")
                if (yield from self._accepts(end)):
                    break
            self._argue(before)
            yield from self._visible()
            self._back(1)
            if mark == "=":
                self._argue(json.dumps((yield from self._word(KEY)), ensure_ascii=False))
            else:
                yield from self._python_string()
            yield from self._require(mark)
            self._argue(": ")
            before = ", "
            yield from self._python(depth - 1)
        self._argue("{}" if before == "{" else "}")

    def _python(self, depth: int) -> Reading:
        """Parses a literal of Python, or of JSON."""
        if not depth:
            raise BrokenError
        if (yield from self._accepts("{")):
            yield from self._pairs("}", ":", depth)
        elif (yield from self._accepts("[")):
            before = "["
            while not (yield from self._accepts("]")):
                if before != "[":
                    yield from self._require(",")
                self._argue(before)
                yield from self._python(depth - 1)
                before = ", "
            self._argue("[]" if before == "[" else "]")
        elif (yield from self._visible()) in ("'", '"'):
            self._back(1)
            yield from self._python_string()
        else:
            self._back(1)
            word = yield from self._word(WORD)
            self._argue(json.dumps(PYTHONIC[word]) if word in PYTHONIC else word)

    def _python_string(self) -> Reading:
        """Adds a string of Python to the arguments, as a JSON string."""

        def say(text: str) -> None:
            self._argue(json.dumps(text, ensure_ascii=False)[1:-1])

        if (quote := (yield from self._visible())) not in ("'", '"'):
            raise BrokenError
        run = Run(any_of(frozenset(f"{quote}\\\n")), self._passed(say))
        self._argue('"')
        while (symbol := (yield from self._next(run))) != quote:
            if symbol == "\n":  # a string of Python ends on its line
                raise BrokenError
            if symbol != "\\":
                say(symbol)
            elif (kind := (yield from self._next())) in DIGITS:
                digits = ""
                for _ in range(DIGITS[kind]):
                    digits += yield from self._next()
                if not re.fullmatch("[0-9a-fA-F]+", digits):
                    raise BrokenError
                if kind == "U":
                    say(chr(min(int(digits, 16), 0x10FFFF)))
                else:  # as JSON, where two surrogates are one character
                    self._argue(f"\\u{digits.zfill(4)}")
            else:
                say(ESCAPES.get(kind, f"\\{kind}"))
        self._argue('"')

    def _quoted(self, quote: str, depth: int) -> Reading:
        """Parses a value in Gemma's format."""
        if not depth:
            raise BrokenError
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
