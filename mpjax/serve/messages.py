"""Checks the chat messages of a request before the chat template gets them."""

from __future__ import annotations

from typing import Any

from mpjax.files.json_text import json_text
from mpjax.serve.errors import RequestError
from mpjax.serve.keys import Table, accepted, ignored, read_keys, refused, text

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
EXAMPLE = '[{"role": "user", "content": "Hello"}]'

# Keys of a message that the server checks; templates get all other keys unchanged.
MESSAGE: Table = {"refusal": text(), "audio": refused(), "function_call": refused()}
# The keys that a content part may have.
PARTS = ("text", "refusal")
PART: Table = {
    "type": accepted('"text"', lambda value: value in PARTS),
    "text": text(),
    "refusal": text(),
    "cache_control": ignored(),
    "prompt_cache_breakpoint": ignored(),
}


def read_messages(found: Any) -> list[dict[str, Any]]:
    """Messages with one of OpenAI's roles and a string as content.

    A list of text parts is joined to one string, and an assistant's refusal becomes its content. An
    assistant message may have tool calls instead of a content.

    Raises RequestError, which names the message and the key, for anything else.
    """
    if not isinstance(found, list) or not found:
        raise _refusal(
            f"messages is {json_text(found)}: expected a list of at least one message, such as "
            f"{EXAMPLE}"
        )
    return [_message(f"messages[{number}]", message) for number, message in enumerate(found)]


def _message(place: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _refusal(
            f"{place} is {json_text(message)}: expected an object with a role and a content"
        )
    if (role := message.get("role")) not in ROLES:
        raise _refusal(
            f"the role of {place} is {json_text(role)}: expected one of {', '.join(ROLES)}"
        )
    own = {key: value for key, value in message.items() if key in MESSAGE}
    refusal = read_keys(own, MESSAGE, place=f"{place}.")["refusal"]
    rest = {key: value for key, value in message.items() if key not in MESSAGE}
    content = message.get("content")
    if refusal is not None:
        if role != "assistant" or content:
            raise _refusal(
                f"{place}.refusal is {json_text(refusal)}: expected one in a message of the "
                "assistant that has no content"
            )
        content = refusal
    if content is None and role == "assistant" and message.get("tool_calls"):
        return rest
    if content is None and role == "function":
        content = ""  # the function returned nothing
    if isinstance(content, list):
        content = "".join(_part(place, part) for part in content)
    if not isinstance(content, str):
        raise _refusal(
            f"the content of {place} is {json_text(content)}: expected a text, or a list of texts"
        )
    return rest | {"content": content}


def _part(place: str, part: Any) -> str:
    """The text of a content part."""
    kind = part.get("type", "text") if isinstance(part, dict) else None
    if kind not in PARTS or not isinstance(part.get(kind), str):
        raise _refusal(
            f"the content of {place} has {json_text(part)}: this server takes texts only, such as "
            '{"type": "text", "text": "Hello"}'
        )
    return str(read_keys(part, PART, place=f"{place}.content.")[kind])


def _refusal(message: str) -> RequestError:
    return RequestError(message, "messages")
