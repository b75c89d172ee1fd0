"""Answers /v1/responses by translation to and from chat completions. Nothing is stored."""

from __future__ import annotations

import dataclasses
import itertools
import json
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

from mpjax.engine.handle import Handle
from mpjax.language_model import LanguageModel
from mpjax.serve.answers import Answer, finish_reason, pieces
from mpjax.serve.errors import RequestError
from mpjax.serve.items import read_items
from mpjax.serve.keys import Table, accepted, read_keys, text
from mpjax.serve.requests import Asked, read_chat, require_object
from mpjax.serve.tables import RESPONSE
from mpjax.text.answers import AnswerReader
from mpjax.text.row_text import RowText
from mpjax.text.tool_calls import Part

# Chat-completions key → key of the Responses API.
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
# Tools that run on OpenAI's servers; they are left out of the prompt.
HOSTED = ("web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation")
NAMESPACE: Table = {
    "type": text(),
    "name": text(),
    "description": text(),
    "tools": accepted("a list of functions", lambda value: isinstance(value, list)).or_else([]),
}
REPEATED = (
    *("instructions", "max_output_tokens", "parallel_tool_calls", "reasoning", "temperature"),
    *("tool_choice", "tools", "top_p"),
)
OWN = ("input", "instructions", "reasoning", "text", "tools", "tool_choice", *NAMES.values())


def read_response(lm: LanguageModel, body: Any, ignore_unknown: bool = False) -> Asked:
    """Parses the body of /v1/responses. Arguments and errors are as for chats."""
    values = read_keys(require_object(body), RESPONSE, ignore_unknown)
    chat = {key: value for key, value in values.items() if key not in OWN}
    chat["messages"] = read_items(values["input"], values["instructions"])
    chat["max_completion_tokens"] = values["max_output_tokens"]
    chat["reasoning_effort"] = (values["reasoning"] or {}).get("effort")
    tools, namespaces = _functions(values["tools"])
    chat["tools"] = [_nested(tool) for tool in tools]
    chat["tool_choice"] = _nested(values["tool_choice"])
    format = (values["text"] or {}).get("format")
    chat["response_format"] = _format(format)
    try:
        asked = read_chat(lm, chat)
    except RequestError as error:
        first, _, rest = (error.parameter or "").partition(".")
        key = ".".join(filter(None, (NAMES.get(first, first), rest)))
        raise RequestError(str(error), key or None, error.status, error.code) from error
    found = {name: values[name] for name in REPEATED}
    found["text"] = {"format": format or {"type": "text"}}
    _require_json(found)
    key = asked.constraint_key
    asked = dataclasses.replace(asked, constraint_key=NAMES.get(key, key))
    return dataclasses.replace(asked, key="input", repeated=found, namespaces=namespaces)


def _require_json(repeated: Mapping[str, Any]) -> None:
    """Raises RequestError for values that aren't valid JSON in UTF-8, such as NaN."""
    for key, value in repeated.items():
        try:
            json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        except ValueError as error:
            message = f"{key} has a text or a number that no answer can repeat: {error}"
            raise RequestError(message, key) from error


def _functions(tools: list[Any]) -> tuple[list[Any], dict[str, str]]:
    """The tools except OpenAI's hosted ones, and the namespace of each tool that has one."""
    found: list[Any] = []
    namespaces: dict[str, str] = {}
    for number, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind in HOSTED:
            continue
        if kind != "namespace":
            found.append(tool)
            continue
        inner = read_keys(tool, NAMESPACE, place=f"tools[{number}].")
        found += inner["tools"]
        names = (one.get("name") for one in inner["tools"] if isinstance(one, dict))
        namespaces |= {str(name): inner["name"] or "" for name in names}
    return found, namespaces


def _format(found: Any) -> Any:
    """The text format as a chat's `response_format`."""
    if not found or found.get("type") != "json_schema":
        return found
    schema = {key: value for key, value in found.items() if key != "type"}
    return {"type": "json_schema", "json_schema": schema}


def _nested(tool: Any) -> Any:
    """A function tool, or the choice of one, in the chat API's form; other values unchanged."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


class Responses:
    """One answer of /v1/responses."""

    end = ""

    def __init__(self) -> None:
        self._sequence = itertools.count()
        self._output: list[_Item] = []
        self._namespaces: Mapping[str, str] = {}

    def whole(self, answer: Answer, handles: Sequence[Handle]) -> dict[str, Any]:
        """The whole answer, after its request has ended."""
        [handle] = handles
        reader = self.reader(answer, handle)
        parts = [*reader.push(handle.text), *reader.finish()]
        for _ in self._events_of(parts):
            pass
        for _ in self._closed():
            pass
        return self._response(answer, handle, finish_reason(handle, parts))

    def reader(self, answer: Answer, handle: Handle) -> AnswerReader:
        """A reader that splits the answer into reasoning, text and tool calls."""
        self._namespaces = answer.asked.namespaces
        return answer.reader(handle)

    async def events(
        self, answer: Answer, index: int, handle: Handle
    ) -> AsyncIterator[dict[str, Any]]:
        """The events of a stream, each with a type and a sequence number."""
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response(answer, None, None))
        reason = None
        async for piece in pieces(self.reader(answer, handle), answer, handle):
            for event in self._events_of(piece.parts):
                yield event
            reason = piece.finish_reason
        for event in self._closed():
            yield event
        response = self._response(answer, handle, reason)
        yield self._event(f"response.{response['status']}", response=response)

    def failure(self, answer: Answer, error: RequestError) -> dict[str, Any]:
        """The last event of a stream that has failed."""
        found = {"code": "server_error", "message": str(error)}
        response = self._response(answer, None, None) | {"status": "failed", "error": found}
        return self._event("response.failed", response=response)

    def closing(self, answer: Answer, handles: Sequence[Handle]) -> list[dict[str, Any]]:
        """Empty: the response's last event has the usage."""
        return []

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "sequence_number": next(self._sequence)} | fields

    def _events_of(self, parts: Iterable[Part]) -> Iterable[dict[str, Any]]:
        """Adds parts of the answer to the output; yields the events of each."""
        for part in parts:
            kind = KINDS.get(part.kind, "function_call")
            last = self._output[-1] if self._output else None
            if last is None or last.is_done or last.kind != kind:
                yield from self._closed()
                namespace = self._namespaces.get(part.text) if part.kind == "call" else None
                last = _Item(kind, len(self._output), part, namespace)
                self._output.append(last)
                for name, fields in last.begun():
                    yield self._event(name, **fields)
            if part.kind in ("end", "broken"):
                yield from self._closed(is_complete=part.kind == "end")
            elif part.kind != "call":
                last.text += part.text
                yield self._event(
                    f"response.{last.names[0]}.delta", **last.place, delta=part.text, **last.more
                )

    def _closed(self, is_complete: bool | None = None) -> Iterable[dict[str, Any]]:
        """Ends the open item. is_complete: None for a default by the item's kind."""
        if not self._output or self._output[-1].is_done:
            return
        item = self._output[-1]
        item.is_done = True
        item.is_complete = item.kind != "function_call" if is_complete is None else is_complete
        for name, fields in item.ended():
            yield self._event(name, **fields)

    def _response(
        self, answer: Answer, handle: Handle | None, reason: str | None
    ) -> dict[str, Any]:
        """The response object so far. handle: of its request once that has ended, else None."""
        asked, is_cut = answer.asked, reason == "length"
        status = "in_progress" if handle is None else "incomplete" if is_cut else "completed"
        found: dict[str, Any] = {
            "id": f"resp_{answer.id}",
            "object": "response",
            "created_at": answer.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": answer.model,
            "output": [] if handle is None else [item.whole for item in self._output],
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None if handle is None else _usage(answer, handle),
            "user": None,
            "metadata": {},
        }
        return {**found, **asked.repeated, "reasoning": _reasoning(asked.repeated)}


KINDS = {"text": "message", "reasoning": "reasoning"}
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
# Kind of item → the name of its delta events, and the key of their text.
NAMES_OF = {
    "message": ("output_text", "text"),
    "reasoning": ("reasoning_text", "text"),
    "function_call": ("function_call_arguments", "arguments"),
}


class _Item:
    """An output item.

    number: the item's index in the output. part: its first part. namespace: of the called tool, or
    None. text: the text so far, or the arguments of a call.
    """

    def __init__(self, kind: str, number: int, part: Part, namespace: str | None) -> None:
        self.kind, self.text, self._namespace = kind, "", namespace
        self._id, self._call = f"{PREFIXES[kind]}_{uuid.uuid4().hex}", part
        self._number = number
        self.names = NAMES_OF[kind]
        self.is_done = self.is_complete = False

    @property
    def place(self) -> dict[str, Any]:
        """The fields of events that locate the item's text."""
        found = {"item_id": self._id, "output_index": self._number}
        return found if self.kind == "function_call" else found | {"content_index": 0}

    @property
    def more(self) -> dict[str, Any]:
        """Further fields of events with text."""
        return {"logprobs": []} if self.kind == "message" else {}

    @property
    def _part(self) -> dict[str, Any]:
        found = {"type": self.names[0], "text": self.text}
        return found | ({"annotations": [], "logprobs": []} if self.kind == "message" else {})

    @property
    def whole(self) -> dict[str, Any]:
        """The item object so far."""
        status = "in_progress" if not self.is_done else "completed"
        status = "incomplete" if self.is_done and not self.is_complete else status
        found: dict[str, Any] = {"id": self._id, "type": self.kind, "status": status}
        content = [self._part] if self.is_done else []
        if self.kind == "message":
            return found | {"role": "assistant", "content": content}
        if self.kind == "reasoning":
            return found | {"summary": [], "content": content, "encrypted_content": None}
        call = {"call_id": self._call.id, "name": self._call.text, "arguments": self.text}
        return found | call | ({} if self._namespace is None else {"namespace": self._namespace})

    def begun(self) -> list[tuple[str, dict[str, Any]]]:
        """Names and fields of the events that begin the item."""
        found = [("response.output_item.added", {"output_index": self._number, "item": self.whole})]
        if self.kind != "function_call":
            found.append(("response.content_part.added", self.place | {"part": self._part}))
        return found

    def ended(self) -> list[tuple[str, dict[str, Any]]]:
        """Names and fields of the events that end the item."""
        name, key = self.names
        found = [(f"response.{name}.done", self.place | {key: self.text} | self.more)]
        if self.kind != "function_call":
            found.append(("response.content_part.done", self.place | {"part": self._part}))
        last = {"output_index": self._number, "item": self.whole}
        return [*found, ("response.output_item.done", last)]


def _reasoning(repeated: Mapping[str, Any]) -> dict[str, Any]:
    asked = repeated.get("reasoning") or {}
    return {"effort": asked.get("effort"), "summary": None}


def _usage(answer: Answer, handle: Handle) -> dict[str, Any]:
    found = answer.usage([handle])
    return {
        "input_tokens": found["prompt_tokens"],
        "input_tokens_details": found["prompt_tokens_details"],
        "output_tokens": found["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": _reasoning_tokens(answer, handle)},
        "total_tokens": found["total_tokens"],
    }


def _reasoning_tokens(answer: Answer, handle: Handle) -> int:
    """The number of new tokens up to the end of the reasoning."""
    if answer.tokenizer.style.channels is None:
        return 0
    row = RowText(answer.tokenizer, handle.prompt, ())
    reader = answer.reader(handle, row.marker_places)
    last = 0
    for number, token in enumerate(handle.tokens, 1):
        row.push([token])
        if any(part.kind == "reasoning" for part in reader.push(row.take())):
            last = number
    return last
