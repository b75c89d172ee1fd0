"""Translates the input items of /v1/responses to chat messages.

Items are messages, tool calls, results of calls, and reasoning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpjax.files.json_text import json_text
from mpjax.serve.errors import RequestError
from mpjax.serve.keys import Key, Table, accepted, anything, ignored, read_keys, text

ROLES = ("system", "developer", "user", "assistant")
TEXTS = ("input_text", "output_text", "text", "reasoning_text")
_OWN: dict[str, Key] = {"type": text(), "id": ignored(), "status": ignored()}
_PART: Table = {
    "type": text(),
    "text": text(),
    "refusal": text(),
    "annotations": ignored(),
    "logprobs": ignored(),
    "prompt_cache_breakpoint": ignored(),
}
_CONTENT = anything("a text, or a list of texts")
ITEMS: Mapping[str, Table] = {
    "message": _OWN
    | {
        "role": accepted(f"one of {', '.join(ROLES)}", lambda value: value in ROLES),
        "content": _CONTENT,
        "phase": ignored(),
    },
    "function_call": _OWN
    | {"call_id": text(), "name": text(), "arguments": text(), "namespace": ignored()},
    "function_call_output": _OWN | {"call_id": text(), "output": _CONTENT},
    # Summaries are not the model's own text, and only OpenAI can decrypt encrypted_content.
    "reasoning": _OWN | {"content": _CONTENT, "summary": ignored(), "encrypted_content": ignored()},
}


def read_items(found: Any, instructions: str | None) -> list[dict[str, Any]]:
    """The messages of a chat for a response's input.

    Reasoning and calls are joined to their assistant message. System and developer messages at the
    begin become one message.

    Raises RequestError, which names the item.
    """
    if isinstance(found, str):
        found = [{"role": "user", "content": found}]
    if not isinstance(found, list) or not found:
        raise _refusal(f"input is {json_text(found)}: expected a text, or a list of items")
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for number, item in enumerate(found):
        _add(messages, f"input[{number}]", item)
    for message in messages:
        if message["role"] == "assistant" and not message.get("tool_calls"):
            message.setdefault("content", "")
    return messages


def _add(messages: list[dict[str, Any]], place: str, item: Any) -> None:
    """Adds an input item to the messages. place: the item's name in errors."""
    if not isinstance(item, dict):
        raise _refusal(f"{place} is {json_text(item)}: expected an item, which is an object")
    kind = item.get("type") or "message"
    if not isinstance(kind, str) or kind not in ITEMS:
        raise _refusal(
            f"the type of {place} is {json_text(kind)}: this server takes {', '.join(ITEMS)}"
        )
    values = read_keys(item, ITEMS[kind], place=f"{place}.")
    if kind == "message":
        _add_message(messages, place, values)
    elif kind == "reasoning":
        if reasoning := _text(f"{place}.content", values["content"] or ""):
            messages.append({"role": "assistant", "reasoning_content": reasoning})
    elif kind == "function_call":
        function = {
            "name": _required(place, values, "name"),
            "arguments": values["arguments"] or "{}",
        }
        call_id = _required(place, values, "call_id")
        call = {"id": call_id, "type": "function", "function": function}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant"})
        messages[-1].setdefault("content", None)
        messages[-1].setdefault("tool_calls", []).append(call)
    else:
        output = _text(f"{place}.output", values["output"])
        call_id = _required(place, values, "call_id")
        messages.append({"role": "tool", "tool_call_id": call_id, "content": output})


def _add_message(messages: list[dict[str, Any]], place: str, values: Mapping[str, Any]) -> None:
    role, content = values["role"], _text(f"{place}.content", values["content"])
    if role is None:
        raise _refusal(f"{place} has no role: expected one of {', '.join(ROLES)}")
    last = messages[-1] if messages else {}
    is_first = len(messages) == 1 and last["role"] in ("system", "developer")
    if is_first and role in ("system", "developer"):
        last["content"] += f"\n\n{content}"
    elif role == "assistant" and last.get("role") == role and "content" not in last:
        last["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _required(place: str, values: Mapping[str, Any], key: str) -> str:
    if not values[key]:
        raise _refusal(f"{place} has no {key}")
    return str(values[key])


def _text(place: str, found: Any) -> str:
    """The text of a content: a string, or a list of text parts, which are joined."""
    if isinstance(found, str):
        return found
    if not isinstance(found, list):
        raise _refusal(f"{place} is {json_text(found)}: expected a text, or a list of texts")
    texts = []
    for number, part in enumerate(found):
        kind = part.get("type") if isinstance(part, dict) else None
        key = "refusal" if kind == "refusal" else "text"
        if kind not in (*TEXTS, "refusal") or not isinstance(part.get(key), str):
            raise _refusal(
                f"{place}[{number}] is {json_text(part, 80)}: this server takes texts only, such "
                'as {"type": "input_text", "text": "Hello"}'
            )
        texts.append(read_keys(part, _PART, place=f"{place}[{number}].")[key])
    return "".join(texts)


def _refusal(message: str) -> RequestError:
    return RequestError(message, "input")
