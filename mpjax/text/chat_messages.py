"""Checks chat messages, rewrites them to a template's form, and finds text that it drops.

Templates differ in the form that they accept: a content as a string or as a list of parts, the
arguments of a tool call as a JSON string or as an object, and a developer message with that role or
as a system message. A template is a program, so the form is found by trial: the template renders
the messages with a unique marker in every text, and a text whose marker is missing is lost.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Message = dict[str, Any]
Change = Callable[[Message], Message]

EXAMPLE = '[{"role": "user", "content": "Hello"}]'
# Keys with a message's content. Other keys only describe it (`name`, `tool_call_id`), or templates
# drop them from later prompts on purpose (`reasoning_content`, `thinking`).
SAID = ("content", "refusal", "audio")
CALLS = ("tool_calls", "function_call")
REASONING = ("reasoning_content", "reasoning", "thinking")  # the names in templates
DESCRIPTIONS = ("type", "id")  # keys of a part without content
WITH_TOOLS = "You are a helpful assistant with some tools."  # of Phi-4-mini's model card
# Begins a marker. It has only digits: templates may change letters and spaces, JSON escapes others.
MARK = "6092541837092604"
WHOLE = f"{MARK}999999"  # a key of each part, rendered only if a template prints parts as data


def checked(messages: Any) -> list[Message]:
    """The messages without keys that are None.

    A content of None is kept in messages with tool calls, since templates look it up.

    Raises ValueError, which names the message, for messages of a wrong form.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        found = "empty" if isinstance(messages, (list, tuple)) else type(messages).__name__
        raise ValueError(f"messages is {found}: expected a list like {EXAMPLE}.")
    return [_checked(number, message) for number, message in enumerate(messages)]


def _checked(number: int, message: Any) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(
            f"message {number} is {message!r:.80}: expected a dict with a role, as {EXAMPLE}."
        )
    require_plain(message, f"message {number}")
    content = message.get("content")
    if content is None and not any(message[key] for key in message if key != "role"):
        raise ValueError(f"message {number} has no content: expected a text, as {EXAMPLE}.")
    if isinstance(content, int | float):
        raise ValueError(
            f"the content of message {number} is {content!r}: expected a text, as {EXAMPLE}."
        )
    for part in content if isinstance(content, list | tuple) else ():
        if not any(True for _ in _texts(part)):
            raise ValueError(
                f"the content of message {number} has {part!r:.80}: the model reads texts only, "
                'such as {"type": "text", "text": "Hello"}.'
            )
    for call in _calls(number, message):
        _arguments(call, number)
    found = {key: value for key, value in message.items() if value is not None}
    return {"content": None, **found} if any(found.get(key) for key in CALLS) else found


def require_plain(value: Any, where: str) -> None:
    """Raises ValueError for anything but plain JSON types: a template could call its methods."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            require_plain(item, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            require_plain(item, f"{where}[{number}]")
    elif not isinstance(value, (str, int, float, bool, type(None))):
        raise ValueError(
            f"{where} is {type(value).__name__}; a chat template takes plain JSON types (tools as "
            "JSON schemas)."
        )


def _calls(number: int, message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The functions that a message calls: objects with `name` and usually `arguments`."""
    calls = message.get("tool_calls") or []
    whole = [{"function": message["function_call"]}] if message.get("function_call") else []
    if not isinstance(calls, list | tuple):
        raise ValueError(f"tool_calls of message {number} is {calls!r:.80}: expected a list.")
    found = []
    for call in [*calls, *whole]:
        function = call.get("function", call) if isinstance(call, Mapping) else call
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"message {number} calls {call!r:.80}: expected a function with a name, such as "
                '{"type": "function", "function": {"name": "add", "arguments": "{}"}}.'
            )
        found.append(function)
    return found


def _arguments(function: Mapping[str, Any], number: int | None = None) -> dict[str, Any]:
    """The arguments of a call as an object; an empty string means no arguments."""
    written = function.get("arguments") or {}
    try:
        found = json.loads(written) if isinstance(written, str) else written
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"message {number} calls {function['name']} with the arguments {written!r:.80}, which "
            f"are not JSON: {error}."
        ) from error
    if not isinstance(found, Mapping):
        raise ValueError(
            f"message {number} calls {function['name']} with the arguments {written!r:.80}: "
            "expected a JSON object."
        )
    return dict(found)


def spellings(messages: Sequence[Message], *, knows_developer: bool) -> Iterator[list[Message]]:
    """The messages in each form that templates may accept, the best first, without repeats.

    Preferred are: the system role for a developer message if the template has no developer role; a
    content as one string rather than parts, and empty rather than None, which templates would
    print; arguments as a string, so that the prompt repeats exactly what the model wrote; and
    reasoning under all names that templates use, or left out if the template rejects it.

    knows_developer: whether the template names that role.
    """
    roles: list[Change] = [dict, _as_system] if knows_developer else [_as_system, dict]
    contents: list[Change] = [_emptied, _joined, dict, _parted]
    arguments: list[Change] = [_with_texts, _with_objects]
    reasoning: list[Change] = [_with_reasoning, _without_reasoning]
    made: list[list[Message]] = []
    for changes in itertools.product(reasoning, roles, contents, arguments):
        found = [functools.reduce(lambda it, change: change(it), changes, one) for one in messages]
        if found not in made:
            made.append(found)
            yield found


def _with_reasoning(message: Message) -> Message:
    found = next((message[name] for name in REASONING if message.get(name)), None)
    return message if found is None else message | dict.fromkeys(REASONING, found)


def _without_reasoning(message: Message) -> Message:
    return {key: value for key, value in message.items() if key not in REASONING}


def _as_system(message: Message) -> Message:
    return message | {"role": "system"} if message["role"] == "developer" else message


def _joined(message: Message) -> Message:
    """The message with its content's parts joined to one string, if all are text parts."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    texts = [part if isinstance(part, str) else _text_of(part) for part in content]
    return message if None in texts else message | {"content": "".join(map(str, texts))}


def _text_of(part: Any) -> str | None:
    is_text = isinstance(part, Mapping) and part.get("type", "text") == "text"
    return part["text"] if is_text and isinstance(part.get("text"), str) else None


def _emptied(message: Message) -> Message:
    """The message with its content as one string; None becomes an empty string."""
    found = _joined(message)
    return found | {"content": ""} if found.get("content", ...) is None else found


def _parted(message: Message) -> Message:
    """The message with its text as a list of one part; None becomes an empty list.

    Lists with other parts than text are unchanged.
    """
    content = _joined(message).get("content", ...)
    if isinstance(content, str):
        return message | {"content": [{"type": "text", "text": content}]}
    return message | {"content": []} if content is None else message


def _with_texts(message: Message) -> Message:
    def text(function: Mapping[str, Any]) -> Any:
        written = function["arguments"]
        return written if isinstance(written, str) else json.dumps(written, ensure_ascii=False)

    return _with_arguments(message, text)


def _with_objects(message: Message) -> Message:
    return _with_arguments(message, _arguments)


def _with_arguments(message: Message, change: Callable[[Mapping[str, Any]], Any]) -> Message:
    """The message with `change` applied to each call that has arguments."""

    def changed(function: Mapping[str, Any]) -> dict[str, Any]:
        has_some = function.get("arguments") is not None
        return {**function, "arguments": change(function)} if has_some else {**function}

    return _with_functions(message, changed)


def _with_functions(
    message: Message, change: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> Message:
    """The message with `change` applied to the function of each call."""
    found = dict(message)
    if message.get("tool_calls"):
        found["tool_calls"] = [
            {**call, "function": change(call["function"])} if "function" in call else change(call)
            for call in message["tool_calls"]
        ]
    if message.get("function_call"):
        found["function_call"] = change(message["function_call"])
    return found


def marked(messages: Sequence[Message]) -> tuple[list[Message], dict[str, str]]:
    """Copies of the messages with a unique marker in every text, and the place of each marker.

    A place is such as "the content of message 2 (user)". `left_out` finds the dropped markers.
    """
    marks, made = _Marks(), []
    for number, message in enumerate(messages):
        place = f"message {number} ({message['role']})"
        found = _with_functions(message, functools.partial(marks.function, place))
        said = {key: message[key] for key in SAID if message.get(key)}
        made.append(
            found | {key: marks.value(f"the {key} of {place}", it) for key, it in said.items()}
        )
    return made, marks.places


def marked_tools(tools: Any) -> tuple[Any, dict[str, str]]:
    """Tools with a unique marker in each function's name, and the tool of each marker."""
    marks, made = _Marks("1"), []
    for tool in tools if isinstance(tools, list | tuple) else ():
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return tools, {}  # another form of tools, which the template may accept
        name = function["name"] + marks.new(f"the tool {function['name']}")
        function = {**function, "name": name}
        made.append({**tool, "function": function} if "function" in tool else function)
    return made or tools, marks.places


def with_tools(messages: list[Message], tools: Any) -> list[Message]:
    """The messages with tools in the system message, where Phi-4-mini's template expects them."""
    first, rest = messages[0], messages[1:]
    if first["role"] != "system":
        first, rest = {"role": "system", "content": WITH_TOOLS}, messages
    functions = [tool.get("function", tool) for tool in tools]
    return [first | {"tools": json.dumps(functions, ensure_ascii=False)}, *rest]


class _Marks:
    """Makes unique markers. places: the place of each. kind: a digit that all of them contain."""

    def __init__(self, kind: str = "0") -> None:
        self.places: dict[str, str] = {}
        self._kind = kind

    def new(self, place: str) -> str:
        """A new marker of a place."""
        made = f"{MARK}{self._kind}{len(self.places):05d}"  # no marker is a part of another
        self.places[made] = place
        return made

    def value(self, place: str, value: Any) -> Any:
        """The value with a marker behind every string in it that has text."""
        if isinstance(value, str):
            return value + self.new(place) if value.strip() else value
        if isinstance(value, Mapping):
            return {
                key: item if key in DESCRIPTIONS else self.value(place, item)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            parts = [self.value(f"{_name(it, i)} of {place}", it) for i, it in enumerate(value)]
            return [{**part, WHOLE: 0} if isinstance(part, dict) else part for part in parts]
        return value

    def function(self, place: str, called: Mapping[str, Any]) -> dict[str, Any]:
        """The function of a call with a marker in its name, and markers as its arguments."""
        place = f"the call of {called['name']} in {place}"
        found = {**called, "name": called["name"] + self.new(place)}
        arguments = called.get("arguments")
        if isinstance(arguments, Mapping):
            found["arguments"] = {(made := self.new(place)): made}
        elif arguments is not None:  # a string must be rendered as it is, not quoted again
            found["arguments"] = json.dumps({self.new(place): 0})
            self.places[found["arguments"]] = place
        return found


def left_out(prompt: str, marks: Mapping[str, str]) -> list[str]:
    """The places of the texts that are missing in a prompt of marked messages.

    All of them, if the template prints content parts as data (Python's repr, or JSON). Arguments of
    a call also count as missing if the template prints an object as Python's repr, or encloses a
    string in further braces.
    """
    return [
        place
        for mark, place in marks.items()
        if mark not in prompt
        or WHOLE in prompt
        or f"{{'{mark}':" in prompt
        or (mark.startswith("{") and f"{{{mark}}}" in prompt)
    ]


def _name(part: Any, number: int) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return f"part {number}" + (f" ({kind})" if isinstance(kind, str) else "")


def _texts(value: Any) -> Iterator[str]:
    """All strings in a value, without those under descriptive keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key not in DESCRIPTIONS:
                yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
