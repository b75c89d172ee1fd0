"""Reads the messages of a chat in a body, before the model's chat template gets them."""

from __future__ import annotations

from typing import Any

from mpjax.files.json_text import json_text
from mpjax.serve.errors import RequestError
from mpjax.serve.keys import Table, accepted, ignored, read_keys, refused, text

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
EXAMPLE = '[{"role": "user", "content": "Hello"}]'

# Keys of a message that the server reads; templates get the others as they are.
MESSAGE: Table = {"refusal": text(), "audio": refused(), "function_call": refused()}
# Parts of a content have no other keys.
PARTS = ("text", "refusal")
PART: Table = {
    "type": accepted('"text"', lambda value: value in PARTS),
    "text": text(),
    "refusal": text(),
    "cache_control": ignored(),
    "prompt_cache_breakpoint": ignored(),
}


def read_messages(found: Any) -> list[dict[str, Any]]:
    """Messages with a role of OpenAI's and one text as content.

    A content that is a list of texts becomes one text, and so does a refusal of the assistant. A
    message of the assistant may have calls of tools in place of a content.

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
        content = ""  # of a function that returns nothing
    if isinstance(content, list):
        content = "".join(_part(place, part) for part in content)
    if not isinstance(content, str):
        raise _refusal(
            f"the content of {place} is {json_text(content)}: expected a text, or a list of texts"
        )
    return rest | {"content": content}


def _part(place: str, part: Any) -> str:
    """The text of a part of a content."""
    kind = part.get("type", "text") if isinstance(part, dict) else None
    if kind not in PARTS or not isinstance(part.get(kind), str):
        raise _refusal(
            f"the content of {place} has {json_text(part)}: this server takes texts only, such as "
            '{"type": "text", "text": "Hello"}'
        )
    return str(read_keys(part, PART, place=f"{place}.content.")[kind])


def _refusal(message: str) -> RequestError:
    return RequestError(message, "messages")
