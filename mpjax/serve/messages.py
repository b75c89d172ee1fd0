"""Reads the messages of a chat in a body, before the model's chat template gets them."""

from __future__ import annotations

from typing import Any

from mpjax.json_text import json_text

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
EXAMPLE = '[{"role": "user", "content": "Hello"}]'


def read_messages(found: Any) -> list[dict[str, Any]]:
    """Messages with a role of OpenAI's and one text as content.

    A content that is a list of texts becomes one text. A message of the assistant may have calls
    of tools in place of a content.

    Raises ValueError, which names the message and the key, for anything else.
    """
    if not isinstance(found, list) or not found:
        raise ValueError(
            f"messages is {json_text(found)}: expected a list of at least one message, such as "
            f"{EXAMPLE}"
        )
    return [_message(f"messages[{number}]", message) for number, message in enumerate(found)]


def _message(place: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(
            f"{place} is {json_text(message)}: expected an object with a role and a content"
        )
    if (role := message.get("role")) not in ROLES:
        raise ValueError(
            f"the role of {place} is {json_text(role)}: expected one of {', '.join(ROLES)}"
        )
    content = message.get("content")
    if content is None and role == "assistant" and message.get("tool_calls"):
        return message
    if isinstance(content, list):
        content = "".join(_part(place, part) for part in content)
    if not isinstance(content, str):
        raise ValueError(
            f"the content of {place} is {json_text(content)}: expected a text, or a list of texts"
        )
    return message | {"content": content}


def _part(place: str, part: Any) -> str:
    """The text of a part of a content."""
    if not isinstance(part, dict) or not isinstance(text := part.get("text"), str):
        raise ValueError(
            f"the content of {place} has {json_text(part)}: this server takes texts only, such as "
            '{"type": "text", "text": "Hello"}'
        )
    return text
