"""Checks the messages of a chat, spells them as templates take them, and finds what one leaves out.

Templates differ in what they take: a content as a text or as a list of parts, the arguments of a
tool's call as JSON text or as an object, and a developer's message as such or as the system's. A
template is a program, so it is asked: it renders the messages with a mark in every text, and a text
whose mark does not reach the prompt is lost.
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
# What a message says. Its other keys only describe it (`name`, `tool_call_id`), or are left out of
# later prompts on purpose (`reasoning_content`, `thinking`).
SAID = ("content", "refusal", "audio")
CALLS = ("tool_calls", "function_call")
REASONING = ("reasoning_content", "reasoning", "thinking")  # what templates call it
DESCRIPTIONS = ("type", "id")  # keys of a part that say nothing
WITH_TOOLS = "You are a helpful assistant with some tools."  # of Phi-4-mini's model card
# Begins a mark. Templates may change letters and blanks, and JSON escapes others; digits stay.
MARK = "6092541837092604"
WHOLE = f"{MARK}999999"  # a key of each part; a template writes it if it writes parts as data


def checked(messages: Any) -> list[Message]:
    """The messages without keys that are None.

    A content of None stays beside calls of tools, since templates ask for it.

    Raises ValueError, which names the message, for messages of another form.
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
    """The functions that a message calls: objects with `name` and, mostly, `arguments`."""
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
    """The arguments of a call as an object; an empty text stands for none."""
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
    """The messages in each way that templates may take them, the best first, without repeats.

    A developer's message is the system's where the template does not know developers. A content is
    one text rather than a list of parts, and rather empty than None, which templates would write.
    Arguments are text where the template takes text: the model then reads what it wrote. Reasoning
    has all names that templates know; it is left out where the template takes none.

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
    """The message with the texts of its content's parts as one text, if they are all texts."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    texts = [part if isinstance(part, str) else _text_of(part) for part in content]
    return message if None in texts else message | {"content": "".join(map(str, texts))}


def _text_of(part: Any) -> str | None:
    is_text = isinstance(part, Mapping) and part.get("type", "text") == "text"
    return part["text"] if is_text and isinstance(part.get("text"), str) else None


def _emptied(message: Message) -> Message:
    """The message with one text as its content, which is empty for a content of None."""
    found = _joined(message)
    return found | {"content": ""} if found.get("content", ...) is None else found


def _parted(message: Message) -> Message:
    """The message with its text as the only part of a list, which is empty for a content of None.

    Other lists stay.
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
    """The message with changed arguments of its calls; of those that have none, without."""

    def changed(function: Mapping[str, Any]) -> dict[str, Any]:
        has_some = function.get("arguments") is not None
        return {**function, "arguments": change(function)} if has_some else {**function}

    return _with_functions(message, changed)


def _with_functions(
    message: Message, change: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> Message:
    """The message with changed functions of its calls."""
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
    """The messages with a mark in every text, and what each mark stands for."""
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
    """Tools with a mark in the name of each function, and what each mark stands for."""
    marks, made = _Marks("1"), []
    for tool in tools if isinstance(tools, list | tuple) else ():
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return tools, {}  # of another form, which the template may know
        name = function["name"] + marks.new(f"the tool {function['name']}")
        function = {**function, "name": name}
        made.append({**tool, "function": function} if "function" in tool else function)
    return made or tools, marks.places


def with_tools(messages: list[Message], tools: Any) -> list[Message]:
    """The messages with tools in the system's, where Phi-4-mini's template looks for them."""
    first, rest = messages[0], messages[1:]
    if first["role"] != "system":
        first, rest = {"role": "system", "content": WITH_TOOLS}, messages
    functions = [tool.get("function", tool) for tool in tools]
    return [first | {"tools": json.dumps(functions, ensure_ascii=False)}, *rest]


class _Marks:
    """Marks that have been given. places: what each stands for. kind: a digit of all of them."""

    def __init__(self, kind: str = "0") -> None:
        self.places: dict[str, str] = {}
        self._kind = kind

    def new(self, place: str) -> str:
        """A mark of a place."""
        made = f"{MARK}{self._kind}{len(self.places):05d}"  # no mark is a part of another
        self.places[made] = place
        return made

    def value(self, place: str, value: Any) -> Any:
        """A text, or lists and objects of texts, with marks."""
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
        """The function of a call with a mark in its name, and marks as its arguments."""
        place = f"the call of {called['name']} in {place}"
        found = {**called, "name": called["name"] + self.new(place)}
        arguments = called.get("arguments")
        if isinstance(arguments, Mapping):
            found["arguments"] = {(made := self.new(place)): made}
        elif arguments is not None:  # a text has to arrive as it is, and not quoted once more
            found["arguments"] = json.dumps({self.new(place): 0})
            self.places[found["arguments"]] = place
        return found


def left_out(prompt: str, marks: Mapping[str, str]) -> list[str]:
    """Names the texts of marked messages that do not reach the prompt.

    All of them, if the template writes parts of a content as data, in Python's spelling or as JSON.
    Arguments of a call are lost where the template writes an object in Python's spelling, or braces
    of its own around a text.
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
    """All texts in a value, without those that only describe it."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key not in DESCRIPTIONS:
                yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
