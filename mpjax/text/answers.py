"""Splits a chat answer into reasoning, text for the user, and tool calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Mapping
from typing import Any

from mpjax.text.channels import Channels, Splitter
from mpjax.text.tool_calls import CallReader, Part, merged
from mpjax.text.tool_formats import ToolFormat


@dataclasses.dataclass(frozen=True)
class Call:
    """A complete tool call. arguments: a JSON object as a string."""

    id: str
    name: str
    arguments: str


@dataclasses.dataclass(frozen=True)
class Message:
    """A chat answer. Incomplete tool calls are part of the text."""

    text: str
    reasoning: str
    calls: list[Call]


@dataclasses.dataclass(frozen=True)
class Style:
    """How a model writes its answers.

    channels: the markers of its reasoning. tools: the format of its tool calls. None: it has none.
    tokens: the markers of both that are single tokens of the vocabulary, by token id.
    """

    channels: Channels | None
    tools: ToolFormat | None
    tokens: Mapping[int, str]


class AnswerReader:
    """Splits a streamed answer into parts.

    prompt: the text before the answer; its end shows whether the answer begins with reasoning.
    at: the character offsets in the answer at which the model wrote a marker as a single token; the
        caller adds to them as the answer grows (`Handle.marker_places`). None if they are unknown:
        then every occurrence of a marker's text counts.
    tools: the schema of the arguments of each tool that may be called, by its name.
    is_single: whether the first complete call ends the answer.

    is_over: whether it has.

    Raises ValueError for tools if the model's format of tool calls is unknown.
    """

    def __init__(
        self,
        style: Style,
        prompt: str = "",
        *,
        at: Container[int] | None = None,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        is_single: bool = False,
    ) -> None:
        self._is_single, self.is_over = is_single, False
        tokens = frozenset(style.tokens.values())
        self._calls, call = None, None
        if tools:
            if style.tools is None:
                raise ValueError("the chat template of the model has no known format of calls")
            if style.tools.in_header:
                call = style.tools.open, style.tools.middle
            self._calls = CallReader(style.tools, tools, call or tokens)
        self._splitter = Splitter(style.channels, prompt, tokens=tokens, at=at, call=call)

    def push(self, piece: str) -> list[Part]:
        """Adds a piece of the answer; returns the parts that are certain."""
        return self._limited(self._read(self._splitter.push(piece)))

    def finish(self) -> list[Part]:
        """The remaining parts, at the end of the answer."""
        parts = self._read(self._splitter.finish())
        return self._limited(parts if self._calls is None else [*parts, *self._calls.finish()])

    def _read(self, parts: Iterable[Part]) -> list[Part]:
        if self._calls is None:
            return merged([part._replace(text=str(part.text)) for part in parts])
        found: list[Part] = []
        for part in parts:
            found += self._calls.push(part.text) if part.kind == "text" else [part]
        return found

    def _limited(self, parts: list[Part]) -> list[Part]:
        """The parts, cut behind the first complete call if that ends the answer."""
        if self.is_over or not self._is_single:
            return [] if self.is_over else parts
        ends = [index for index, part in enumerate(parts) if part.kind == "end"]
        self.is_over = bool(ends)
        return parts[: ends[0] + 1] if ends else parts


def has_calls(parts: Iterable[Part], is_cut: bool = False) -> bool:
    """Whether an answer counts as one with tool calls. is_cut: whether its end is missing.

    It has a complete call. If the answer is cut, that call is also its last part.
    """
    kinds = [part.kind for part in parts]
    return "end" in kinds and not (is_cut and kinds[-1] != "end")


def message_of(parts: Iterable[Part]) -> Message:
    """Joins the parts of a whole answer to a message."""
    texts: dict[str, list[str]] = {"text": [], "reasoning": []}
    calls: list[Call] = []
    begun, arguments = Part("call", ""), list[str]()
    for part in parts:
        if part.kind == "call":
            begun, arguments = part, []
        elif part.kind == "arguments":
            arguments.append(part.text)
        elif part.kind == "end":
            calls.append(Call(begun.id, begun.text, "".join(arguments)))
        else:
            texts["text" if part.kind == "broken" else part.kind].append(part.text)
    return Message(**{kind: "".join(found) for kind, found in texts.items()}, calls=calls)
