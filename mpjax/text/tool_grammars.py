"""Grammars of answers with tool calls, in llguidance's Lark dialect.

They are built from the descriptions that also parse answers (`tool_formats.py`). Markers that are
tokens of the model are tokens of the grammar; text between them is any text without such tokens.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mpjax.text.answers import Style
from mpjax.text.channels import HARMONY, Splitter
from mpjax.text.tool_formats import (
    AsJson,
    AsParameters,
    InObject,
    Pythonic,
    Quoted,
    ToolFormat,
)
from mpjax.text.tool_schemas import PYTHONIC, property_of, types

TEXT = "TEXT: /(.|\\n)*/"
ANY = {"type": "object"}
# Where JSON allows any white space, a model could write it without end.
SPACES = {"x-guidance": {"whitespace_pattern": "[ \\n\\t\\r]{1,16}"}}
# Schema keys of strings that a grammar of unquoted text does not enforce.
UNENFORCED = ("pattern", "format", "minLength", "maxLength")
NO_FORMAT = ToolFormat("none", (), AsJson())
LEAVES = {"integer", "number", "boolean", "null"}


@dataclasses.dataclass(frozen=True)
class Called:
    """A tool in a grammar.

    is_strict: whether a string schema that the grammar can't enforce is an error.
    """

    name: str
    schema: Mapping[str, Any]
    is_strict: bool = False


def grammar(
    style: Style,
    tools: Sequence[Called],
    *,
    prompt: str = "",
    is_required: bool = True,
    is_single: bool = False,
    has_answer: bool = False,
) -> str:
    """The grammar of answers that call these tools, after the reasoning that may come first.

    prompt: the end of the text before the answer, which shows whether reasoning has begun.
        is_required: whether the answer must be calls only, rather than text or text with calls.
        is_single: whether it has at most one call. has_answer: whether the text for the user has a
        grammar of its own, the rule `answer`; then the answer is either calls or such a text.

    Raises ValueError for a schema that the format's grammar can't enforce, and if calls within free
    text don't begin with a token of the model.
    """
    made = _Grammar(style, is_single)
    calls = [made.call(tool) for tool in tools]
    if calls:
        made.rules.append(f"call: {' | '.join(calls)}")
    if is_required:
        whole = made.required()
    elif has_answer:
        text = f"{made.final()} @answer"
        whole = f"({made.required()} | {text})" if calls else text
    else:
        whole = made.free()
    begin = made.before(Splitter(style.channels, prompt).reasoning)
    return "\n".join(["%llguidance {}", f"start: {begin} {whole}", TEXT, *made.rules])


class _Grammar:
    """Collects the rules of a grammar. Rules and expressions are strings of Lark."""

    def __init__(self, style: Style, is_single: bool) -> None:
        self._style, self._format = style, style.tools or NO_FORMAT
        self._is_single = is_single or self._format.is_single
        self._ids = {text: index for index, text in style.tokens.items()}
        self.rules: list[str] = []

    def rule(self, expression: str, kind: str = "") -> str:
        """Adds a rule for an expression; returns the rule's name."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{kind}: {expression}")
        return name

    def literal(self, text: str) -> str:
        """The expression of a literal text, with its markers as tokens."""
        for marker, index in self._ids.items():
            before, found, behind = text.partition(marker)
            if found:
                return f"{self.literal(before)} <[{index}]> {self.literal(behind)}"
        return json.dumps(text, ensure_ascii=False) if text else ""

    def up_to(self, text: str) -> str:
        """Any text up to and including the first occurrence of `text`, which is not empty."""
        first = self.literal(text).strip()
        if first.startswith("<["):
            return f"TEXT {first}"
        words = text
        for marker in self._ids:
            words = words.partition(marker)[0]
        plain = self.rule(f"TEXT {self.literal(words)}", "[lazy]")
        return f"{plain} {self.literal(text[len(words) :])}"

    def json(self, schema: Mapping[str, Any]) -> str:
        """The expression of a JSON value that matches a schema."""
        return f"%json {json.dumps({**schema, **SPACES}, ensure_ascii=False)}"

    def before(self, reasoning: str) -> str:
        """The expression of the reasoning and headers before text and calls."""
        channels = self._style.channels
        if channels is HARMONY:
            end = self.literal("<|end|><|start|>assistant")
            hidden = self.literal("<|channel|>analysis<|message|>")
            shown = self.literal("<|channel|>commentary<|message|>")
            return f"(({hidden} | {shown}) TEXT {end})*"
        if channels is None or reasoning == "no":
            return ""
        states = channels.states.items()
        begin, end = (next(m for m, s in states if s == kind) for kind in ("reasoning", "text"))
        thought = self.rule(f"{self.up_to(end)} /[ \\n]{{0,4}}/")
        return thought if reasoning == "open" else f"({self.literal(begin)} {thought})?"

    def final(self) -> str:
        """The expression of the header before text for the user."""
        is_harmony = self._style.channels is HARMONY
        return self.literal("<|channel|>final<|message|>") if is_harmony else ""

    def required(self) -> str:
        """The expression of an answer of calls alone."""
        format = self._format
        begin, end = self.literal(format.begin), self.literal(format.end)
        if format.is_bare:
            begin = end = ""
        if isinstance(format.arguments, InObject | Pythonic) and format.arguments.listed:
            begin, end, between = f'{begin} "["', f'"]" {end}', ", "
        else:
            between = format.between
        more = f"{self.literal(between)}{'?' if between.isspace() else ''}"
        if format.wraps_each:
            one = self.rule(f"{begin} call {end}")
            return one if self._is_single else f"{one} ({more} {one})*"
        return f"{begin} call {'' if self._is_single else f'({more} call)*'} {end}"

    def free(self) -> str:
        """The expression of free text that may contain calls of the tools."""
        format = self._format
        calls = self.required()
        if format.is_bare:
            first = "\\[" if isinstance(format.arguments, Pythonic) else "{"
            return f"({calls} | /([^{first}\\s](.|\\n)*)?/)"
        if format.in_header:
            return f"({calls} | {self.final()} TEXT)"
        opener = self.literal(format.begin or format.open).strip()
        if opener.startswith("<["):
            block = f"TEXT {calls}"
        else:
            raise ValueError(
                f"calls in the format {format.name} begin with no token of the model, so the "
                "grammar of an answer in which they are free is not known"
            )
        return f"({block}){'?' if self._is_single else '*'} TEXT"

    def call(self, tool: Called) -> str:
        """Adds the rule of a call of a tool; returns the rule's name."""
        format = self._format
        if isinstance(format.arguments, InObject):
            # One literal per JSON token, since other JSON text may begin with the same characters.
            key = format.arguments.key
            head = ["{", '"name"', ":", " ", json.dumps(tool.name), ",", " ", f'"{key}"', ":", " "]
            before = " ".join(map(self.literal, head))
            return self.rule(f"{before} {self.json(tool.schema)} {self.literal('}')}")
        if isinstance(format.arguments, Pythonic):
            return self.rule(f"{self.literal(f'{tool.name}(')} {self.pairs(tool.schema, ')', '=')}")
        open, middle = self.literal(format.open + tool.name), self.literal(format.middle)
        if format.number:
            middle = f"{self.literal(format.number)} /{format.number_pattern}/ {middle}"
        close = self.literal(format.close)
        if isinstance(format.arguments, AsJson):
            arguments = self.json(tool.schema)
        elif isinstance(format.arguments, AsParameters):
            arguments = self.parameters(format.arguments, tool)
            close = self.literal(format.close.lstrip())
        else:
            arguments = self.quoted_object(format.arguments, tool.schema, tool)
        return self.rule(f"{open} {middle} {arguments} {close}")

    def parameters(self, style: AsParameters, tool: Called) -> str:
        """The expression of arguments between markers, in the schema's order."""
        space = self._format.close[: -len(self._format.close.lstrip())]
        parts = []
        for key, is_needed in _keys(tool.schema):
            schema = property_of(tool.schema, key)
            begin = self.literal(f"{style.open}{key}{style.middle}")
            value = (
                self.text(style.close, schema, tool)
                if _may_be_text(schema)
                else (f"{self.json(schema)} {self.literal(style.close)}")
            )
            parts.append(f"({begin} {value} {self.literal(space)}){'' if is_needed else '?'}")
        if not tool.schema.get("properties"):
            any_key = f"{self.literal(style.open)} /[A-Za-z0-9_.-]{{1,64}}/ "
            any_key += f"{self.literal(style.middle)} {self.up_to(style.close)}"
            parts.append(f"({any_key} {self.literal(space)})*")
        return " ".join(parts)

    def text(self, end: str, schema: Mapping[str, Any], tool: Called) -> str:
        """The expression of an unquoted string and of the literal `end` behind it."""
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list):
            written = (v if isinstance(v, str) else json.dumps(v) for v in values)
            return f"({' | '.join(map(self.literal, written))}) {self.literal(end)}"
        if tool.is_strict and (found := [key for key in UNENFORCED if key in schema]):
            raise ValueError(
                f"the tool {tool.name} is strict, and {found[0]} of its arguments is not enforced "
                f"in the format {self._format.name}"
            )
        return self.up_to(end)

    def quoted_object(self, style: Quoted, schema: Mapping[str, Any], tool: Called) -> str:
        """The expression of an object in Gemma's format, with sorted keys."""
        keys = sorted(_keys(schema))
        if not keys:
            pair = f'/[^:,{{}}]{{1,64}}/ ":" {self.quoted_any(style)}'
            return f'"{{" ({pair} ("," {pair})*)? "}}"'
        pairs = [
            (
                f"{self.literal(f'{key}:')} {self.quoted(style, property_of(schema, key), tool)}",
                need,
            )
            for key, need in keys
        ]
        return f'"{{" {self.sequence(pairs, ",", "}")}'

    def sequence(self, pairs: Sequence[tuple[str, bool]], comma: str, end: str) -> str:
        """The expression of pairs in this order, of which some are required, and of the end."""
        tail_first = tail_more = self.literal(end)
        for pair, is_needed in reversed(pairs):
            skip_first = "" if is_needed else f" | {tail_first}"
            skip_more = "" if is_needed else f" | {tail_more}"
            tail_first = self.rule(f"{pair} {tail_more}{skip_first}")
            tail_more = self.rule(f"{self.literal(comma)} {pair} {tail_more}{skip_more}")
        return tail_first

    def pairs(self, schema: Mapping[str, Any], end: str, mark: str) -> str:
        """The expression of the arguments of a call of Python, or of a dictionary, and their end.

        mark: "=" between an argument's name and its value, or ": " behind a quoted key.
        """
        keys = list(_keys(schema))
        if not keys:
            name = "/[A-Za-z_][A-Za-z0-9_]{0,63}/" if mark == "=" else self.python_string({})
            pair = f"{name} {self.literal(mark)} {self.python({})}"
            return f'({pair} (", " {pair})*)? {self.literal(end)}'
        found = []
        for key, is_needed in keys:
            name = self.literal(key if mark == "=" else json.dumps(key, ensure_ascii=False))
            value = self.python(property_of(schema, key))
            found.append((f"{name} {self.literal(mark)} {value}", is_needed))
        return self.sequence(found, ", ", end)

    def python(self, schema: Mapping[str, Any]) -> str:
        """The expression of a literal of Python that matches a schema."""
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list):
            return f"({' | '.join(self.literal(repr(value)) for value in values)})"
        if not (allowed := types(schema)):
            if not any(rule.startswith("python:") for rule in self.rules):
                every = {"type": ["string", "number", "boolean", "null", "array", "object"]}
                self.rules.append("python: ")  # first, as the rule refers to itself
                self.rules[self.rules.index("python: ")] += self.python(every)
            return "python"
        found = [f'"{word}"' for word, value in PYTHONIC.items() if _kind_of(value) in allowed]
        if numbers := sorted(allowed & {"integer", "number"}):
            found.append(self.json({**schema, "type": numbers}))
        if "string" in allowed:
            found.append(self.python_string(schema))
        if "array" in allowed:
            items = schema.get("items")
            one = self.python(items if isinstance(items, Mapping) else {})
            found.append(f'"[" ({one} (", " {one})*)? "]"')
        if "object" in allowed:
            found.append(f'"{{" {self.pairs(schema, "}", ": ")}')
        return f"({' | '.join(found)})"

    def python_string(self, schema: Mapping[str, Any]) -> str:
        """The expression of a string of Python; one in single quotes has no schema to match."""
        whole = self.json({**schema, "type": "string"})
        if any(key in schema for key in UNENFORCED):
            return whole
        return f"({whole} | /'([^'\\\\\\n]|\\\\[^\\n])*'/)"

    def quoted(self, style: Quoted, schema: Mapping[str, Any], tool: Called) -> str:
        """The expression of a value in Gemma's format that matches a schema."""
        allowed = types(schema)
        quote = self.literal(style.quote)
        found = []
        if "string" in allowed:
            found.append(f"{quote} {self.text(style.quote, schema, tool)}")
        if "object" in allowed:
            found.append(self.quoted_object(style, schema, tool))
        if "array" in allowed:
            items = schema.get("items")
            one = self.quoted(style, items if isinstance(items, Mapping) else {}, tool)
            found.append(f'"[" ({one} ("," {one})*)? "]"')
        if leaves := sorted(allowed & LEAVES):
            found.append(self.json({**schema, "type": leaves}))
        return f"({' | '.join(found)})" if found else self.quoted_any(style)

    def quoted_any(self, style: Quoted) -> str:
        """The name of the rule of any value in Gemma's format."""
        if "any:" not in " ".join(self.rules):
            quote = self.literal(style.quote)
            pair = '/[^:,{}]{1,64}/ ":" any'
            self.rules.append(
                f"any: {quote} {self.up_to(style.quote)} | {self.json({'type': sorted(LEAVES)})}"
                f' | "[" (any ("," any)*)? "]" | "{{" ({pair} ("," {pair})*)? "}}"'
            )
        return "any"


def _kind_of(value: bool | None) -> str:
    """The JSON type of one of Python's constants."""
    return "null" if value is None else "boolean"


def _may_be_text(schema: Mapping[str, Any]) -> bool:
    """Whether a schema allows strings, or names no type."""
    return not types(schema) or "string" in types(schema)


def _keys(schema: Mapping[str, Any]) -> Iterable[tuple[str, bool]]:
    """The name of each argument in a schema, and whether it is required."""
    required, properties = schema.get("required"), schema.get("properties")
    needed = required if isinstance(required, list) else []
    keys = properties if isinstance(properties, Mapping) else {}
    return [(key, key in needed) for key in keys]
