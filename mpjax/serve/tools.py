"""Parses the tools of a chat request, and the choice among them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from mpjax.files.json_text import json_text
from mpjax.serve.errors import NOT_OFFERED, RequestError
from mpjax.serve.keys import Table, accepted, flag, ignored, read_keys, refused, text
from mpjax.text.answers import Style
from mpjax.text.tool_formats import ToolFormat
from mpjax.text.tool_grammars import ANY, Called, grammar

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
EXAMPLE = '{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}'
CHOICES = ("none", "auto", "required")


def _is_function(value: object) -> bool:
    return value == "function"


FUNCTION: Table = {
    "name": accepted(
        "a name of up to 64 letters, digits, points, lines and underscores",
        lambda value: isinstance(value, str) and NAME.fullmatch(value) is not None,
    ),
    "description": text(),
    "parameters": accepted("a JSON schema of an object", lambda value: isinstance(value, dict)),
    "strict": flag(),
    "output_schema": ignored(),
    "defer_loading": refused(False),
}
TOOL: Table = {
    "type": accepted('"function"', _is_function),
    "function": accepted("an object", lambda value: isinstance(value, dict)),
}


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function that the model may call. is_strict: whether arguments must match the schema."""

    name: str
    description: str | None
    parameters: dict[str, Any]
    is_strict: bool

    @property
    def definition(self) -> dict[str, Any]:
        """The tool in the form that chat templates expect."""
        found = {"name": self.name, "parameters": self.parameters}
        if self.description is not None:
            found = {"name": self.name, "description": self.description} | found
        return {"type": "function", "function": found}


@dataclasses.dataclass(frozen=True)
class Tools:
    """The tools of a request. is_single: whether the first call ends the answer.

    choice: `auto`, `required`, or the name of the tool that the model must call.
    """

    tools: list[Tool]
    choice: str = "auto"
    is_single: bool = False

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """The schema of the arguments of each tool, by its name."""
        return {tool.name: tool.parameters for tool in self.tools}

    def grammar(self, style: Style, prompt: str, has_answer: bool = False) -> str | None:
        """The grammar of the answer; None if the answer is unconstrained.

        prompt: the end of the text before the answer. has_answer: whether the text for the user has
        a grammar of its own, the rule `answer`.

        Raises ValueError for a tool that no grammar can enforce.
        """
        is_free = self.choice == "auto"
        if is_free and not has_answer and not any(tool.is_strict for tool in self.tools):
            return None
        is_named = self.choice not in CHOICES
        called = [
            Called(
                tool.name,
                tool.parameters if tool.is_strict or not is_free else ANY,
                is_strict=tool.is_strict,
            )
            for tool in self.tools
            if not is_named or tool.name == self.choice
        ]
        return grammar(
            style,
            called,
            prompt=prompt,
            is_required=not is_free,
            is_single=is_named or self.is_single,
            has_answer=has_answer,
        )


def read_tools(values: Mapping[str, Any], format: ToolFormat | None) -> Tools | None:
    """The tools of a chat request; None if the model may not call tools.

    values: of the body's keys. format: the model's format of tool calls, or None. Raises
    RequestError, which names the key.
    """
    tools = [_tool(f"tools[{number}]", found) for number, found in enumerate(values["tools"])]
    choice, is_named = _choice(values["tool_choice"])
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise RequestError(f"two tools are called {json_text(name, 80)}", "tools")
    if not tools and (is_named or choice == "required"):
        raise RequestError("tool_choice asks for a call, and there are no tools", "tool_choice")
    if is_named and choice not in names:
        raise RequestError(
            f"tool_choice names {json_text(choice, 80)}, which is none of the tools", "tool_choice"
        )
    if not tools or choice == "none":
        return None
    if format is None:
        raise RequestError(
            "the chat template of the model has no format of calls that this server knows: leave "
            "tools out",
            "tools",
            code=NOT_OFFERED,
        )
    return Tools(tools, choice, not values["parallel_tool_calls"])


def _choice(found: Any) -> tuple[str, bool]:
    """The choice (`auto`, `required`, `none`, or a tool's name), and whether it is a name."""
    if found in CHOICES:
        return found, False
    if isinstance(found, dict):
        function = read_keys(found, TOOL, place="tool_choice.")["function"] or {}
        named = read_keys(function, {"name": text()}, place="tool_choice.function.")["name"]
        if named:
            return named, True
    raise RequestError(
        f"tool_choice is {json_text(found)}: expected {', '.join(map(json_text, CHOICES))}, or "
        '{"type": "function", "function": {"name": "add"}}',
        "tool_choice",
    )


def _tool(place: str, found: Any) -> Tool:
    if not isinstance(found, dict):
        raise RequestError(f"{place} is {json_text(found)}: expected {EXAMPLE}", "tools")
    function = read_keys(found, TOOL, place=f"{place}.")["function"] or {}
    function = read_keys(function, FUNCTION, place=f"{place}.function.")
    if function["name"] is None:
        raise RequestError(f"{place} has no function with a name: expected {EXAMPLE}", "tools")
    parameters = function["parameters"]
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    return Tool(function["name"], function["description"], parameters, function["strict"])
