"""Builds the JSON objects of OpenAI's completions and chat completions."""

from __future__ import annotations

import abc
import dataclasses
import time
import uuid
from collections.abc import AsyncIterator, Container, Sequence
from typing import Any, Protocol

from mpjax.engine.handle import CancelledError, Handle
from mpjax.serve.constraints import TAIL
from mpjax.serve.errors import RequestError
from mpjax.serve.places import Places, prompt_places
from mpjax.serve.requests import Asked
from mpjax.text.answers import AnswerReader, Call, has_calls, message_of
from mpjax.text.spelling import token_bytes, token_name
from mpjax.text.tokenizer import Tokenizer
from mpjax.text.tool_calls import Part

DELTAS = {"text": "content", "reasoning": "reasoning_content"}


@dataclasses.dataclass(frozen=True)
class Answer:
    """The parts that all objects of one answer share, whole or streamed in chunks.

    tokenizer: of the model. model: the model's name. id, created: of the answer.
    """

    tokenizer: Tokenizer
    model: str
    asked: Asked
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def usage(self, handles: Sequence[Handle]) -> dict[str, Any]:
        """The `usage` object: numbers of prompt, completion and cached tokens.

        The choices of a prompt share it, so its tokens count once. Cached tokens are those of the
        first choice only: later choices hit pages that the first one wrote.
        """
        first = handles[:: self.asked.requests]
        prompt = sum(len(handle.prompt) for handle in first)
        is_generated = self.asked.max_new_tokens != 0
        new = sum(len(handle.tokens) for handle in handles if is_generated)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(h.shared_tokens for h in first)},
        }

    def best(self, handles: Sequence[Handle]) -> list[Handle]:
        """Each prompt's choices, by log-probability per token if they are the best of more."""
        several, kept = self.asked.requests, self.asked.choices
        if several == kept:
            return list(handles)
        batches = [handles[at : at + several] for at in range(0, len(handles), several)]
        ranked = (sorted(batch, key=_logprob_per_token, reverse=True) for batch in batches)
        return [handle for batch in ranked for handle in batch[:kept]]

    def frame(self, kind: str, prefix: str, choices: list[Any]) -> dict[str, Any]:
        """The object that encloses choices. kind: its `object`. prefix: of its id."""
        head = {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created}
        return head | {"model": self.model, "choices": choices}

    def reader(self, handle: Handle, at: Container[int] | None = None) -> AnswerReader:
        """A reader that splits a chat answer into reasoning, text and tool calls.

        at: the offsets of markers that are single tokens; None for the handle's own.
        """
        prompt, tools = self.tokenizer.decode(handle.prompt[-TAIL:], False), self.asked.tools
        return AnswerReader(
            self.tokenizer.style,
            prompt,
            at=handle.marker_places if at is None else at,
            tools=None if tools is None else tools.schemas,
            is_single=tools is not None and tools.is_single,
        )

    def echo(self, index: int) -> str:
        """The text of a choice's prompt if the request has `echo`, else an empty string."""
        return self.asked.echoes[index // self.asked.choices] if self.asked.echoes else ""

    def places(self, handle: Handle, echo: str = "") -> Places:
        """The text offsets of a choice's new tokens. echo: the echoed prompt before them."""
        return Places(self.tokenizer, handle.prompt, len(echo))

    def bytes_of(self, token: int) -> bytes:
        """The bytes of one token, special tokens included."""
        return token_bytes(self.tokenizer, token)


class Style(Protocol):
    """The format of one endpoint's answers.

    end: the last line of a stream.
    """

    end: str

    def whole(self, answer: Answer, handles: Sequence[Handle]) -> dict[str, Any]:
        """The whole answer, after all requests have ended."""

    def reader(self, answer: Answer, handle: Handle) -> AnswerReader | None:
        """A reader that splits a choice into reasoning, text and calls; None for no such parts."""

    def events(self, answer: Answer, index: int, handle: Handle) -> AsyncIterator[dict[str, Any]]:
        """The streamed objects of a choice, while it is generated."""

    def failure(self, answer: Answer, error: RequestError) -> dict[str, Any]:
        """The object that reports an error in a stream."""

    def closing(self, answer: Answer, handles: Sequence[Handle]) -> list[dict[str, Any]]:
        """The last objects of a stream, after those of all choices."""


class _Chunked(abc.ABC):
    """An endpoint whose stream consists of chunks, each with the next text of a choice."""

    end = "data: [DONE]\n\n"

    @abc.abstractmethod
    def reader(self, answer: Answer, handle: Handle) -> AnswerReader | None:
        """A reader that splits a choice into reasoning, text and calls; None for no such parts."""

    @abc.abstractmethod
    def first(self, answer: Answer, index: int, handle: Handle) -> dict[str, Any] | None:
        """A chunk before the first text of a choice, or None."""

    @abc.abstractmethod
    def chunk(self, answer: Answer, index: int, piece: Piece) -> dict[str, Any]:
        """A chunk with the next text of a choice."""

    @abc.abstractmethod
    def frame(self, answer: Answer) -> dict[str, Any]:
        """A chunk without choices."""

    async def events(
        self, answer: Answer, index: int, handle: Handle
    ) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a choice."""
        if (first := self.first(answer, index, handle)) is not None:
            yield first
        async for piece in pieces(self.reader(answer, handle), answer, handle):
            yield self.chunk(answer, index, piece)

    def failure(self, answer: Answer, error: RequestError) -> dict[str, Any]:
        """The error object, sent in place of a chunk."""
        return error.as_object

    def closing(self, answer: Answer, handles: Sequence[Handle]) -> list[dict[str, Any]]:
        """A chunk with the usage, if the request asks for it."""
        usage = {"usage": answer.usage(handles)}
        return [self.frame(answer) | usage] if answer.asked.with_usage else []


@dataclasses.dataclass(frozen=True)
class Piece:
    """New text of a request, with the tokens since the piece before.

    finish_reason: set in the last piece. offsets: the text offsets of the tokens, if
    log-probabilities are requested. parts: what the reader split off, if there is one; they may
    lag behind the text.
    """

    handle: Handle
    text: str
    begin: int
    end: int
    finish_reason: str | None = None
    offsets: Sequence[int] = ()
    parts: Sequence[Part] = ()


async def pieces(
    reader: AnswerReader | None, answer: Answer, handle: Handle
) -> AsyncIterator[Piece]:
    """The text of a request in pieces, each with its tokens; the last has the finish reason.

    reader: splits the text into parts, or None.
    """
    begin = 0
    seen: list[Part] = []
    places = answer.places(handle) if answer.asked.logprobs else None

    def piece(text: str, reason: str | None, parts: Sequence[Part]) -> Piece:
        end = len(handle.tokens)
        offsets = [] if places is None else places.of(handle.tokens[begin:end])
        return Piece(handle, text, begin, end, reason, offsets, parts)

    try:
        async for text in handle:
            if reader is not None and reader.is_over:
                continue  # the request ends soon
            new = piece(text, None, [] if reader is None else reader.push(text))
            begin = new.end
            seen += new.parts
            yield new
            if reader is not None and reader.is_over:
                handle.cancel()
    except CancelledError:
        if reader is None or not reader.is_over:
            raise
    last = [] if reader is None else reader.finish()
    yield piece("", finish_reason(handle, [*seen, *last]), last)


def finish_reason(handle: Handle, parts: Sequence[Part]) -> str | None:
    """The finish reason of an answer: "tool_calls", or that of its request."""
    reason = handle.finish_reason
    return "tool_calls" if has_calls(parts, is_cut=reason == "length") else reason


def _logprob_per_token(handle: Handle) -> float:
    return sum(handle.logprobs) / len(handle.logprobs) if handle.logprobs else 0.0


class Completions(_Chunked):
    """The answers of /v1/completions."""

    def whole(self, answer: Answer, handles: Sequence[Handle]) -> dict[str, Any]:
        """The answer, when all requests have ended."""
        best = answer.best(handles)
        choices = [self._choice(answer, index, handle) for index, handle in enumerate(best)]
        return answer.frame("text_completion", "cmpl", choices) | {"usage": answer.usage(handles)}

    def _choice(self, answer: Answer, index: int, handle: Handle) -> dict[str, Any]:
        asked, echo = answer.asked, answer.echo(index)
        only_prompt = asked.max_new_tokens == 0
        text, reason = ("", "length") if only_prompt else (handle.text, handle.finish_reason)
        found: dict[str, Any] = {"index": index, "text": echo + text, "finish_reason": reason}
        found["logprobs"] = None
        if asked.logprobs:
            entries, offsets = [], []
            if asked.echoes:
                entries += _prompt_entries(answer, handle)
                offsets += prompt_places(answer.tokenizer, handle.prompt, echo)
            if not only_prompt:
                entries += _entries(answer, handle, 0, len(handle.tokens))
                offsets += answer.places(handle, echo).of(handle.tokens)
            found["logprobs"] = _in_columns(entries, offsets, asked.top > 0)
        return found

    def reader(self, answer: Answer, handle: Handle) -> AnswerReader | None:
        """None: completions are not split into parts."""
        return None

    def first(self, answer: Answer, index: int, handle: Handle) -> dict[str, Any] | None:
        """A chunk with the prompt, if the request has `echo`."""
        if not answer.asked.echoes:
            return None
        return self._chunk(answer, index, answer.echo(index), None, None)

    def chunk(self, answer: Answer, index: int, piece: Piece) -> dict[str, Any]:
        """A chunk with the next text of a choice."""
        logprobs = None
        if answer.asked.logprobs:
            entries = _entries(answer, piece.handle, piece.begin, piece.end)
            logprobs = _in_columns(entries, piece.offsets, answer.asked.top > 0)
        return self._chunk(answer, index, piece.text, logprobs, piece.finish_reason)

    def frame(self, answer: Answer) -> dict[str, Any]:
        """A chunk without choices."""
        return answer.frame("text_completion", "cmpl", [])

    def _chunk(
        self, answer: Answer, index: int, text: str, logprobs: Any, reason: str | None
    ) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return answer.frame("text_completion", "cmpl", [choice])


class Chats(_Chunked):
    """The answers of /v1/chat/completions."""

    def whole(self, answer: Answer, handles: Sequence[Handle]) -> dict[str, Any]:
        """The answer, when all requests have ended."""
        choices = [self._choice(answer, index, handle) for index, handle in enumerate(handles)]
        return answer.frame("chat.completion", "chatcmpl", choices) | {
            "usage": answer.usage(handles)
        }

    def _choice(self, answer: Answer, index: int, handle: Handle) -> dict[str, Any]:
        reader = answer.reader(handle)
        parts = [*reader.push(handle.text), *reader.finish()]
        found = message_of(parts)
        message: dict[str, Any] = {"role": "assistant", "refusal": None, "content": found.text}
        if answer.tokenizer.style.channels is not None:
            message["reasoning_content"] = found.reasoning or None
        if found.calls:
            message["content"] = found.text or None
            message["tool_calls"] = list(map(_called, found.calls))
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(answer, handle, 0, len(handle.tokens)),
            "finish_reason": finish_reason(handle, parts),
        }

    def reader(self, answer: Answer, handle: Handle) -> AnswerReader | None:
        """A reader that splits a choice into reasoning, text and tool calls."""
        return answer.reader(handle)

    def first(self, answer: Answer, index: int, handle: Handle) -> dict[str, Any] | None:
        """A chunk with the role."""
        return self._chunk(answer, index, {"role": "assistant", "content": ""}, None, None)

    def chunk(self, answer: Answer, index: int, piece: Piece) -> dict[str, Any]:
        """A chunk with the next text of a choice."""
        delta: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for part in piece.parts:
            if (key := DELTAS.get(part.kind)) is not None:
                delta[key] = delta.get(key, "") + part.text
            elif part.kind == "call":
                calls[part.number] = _called(Call(part.id, part.text, ""))
            elif part.kind == "arguments":
                entry = calls.setdefault(part.number, {"function": {"arguments": ""}})
                entry["function"]["arguments"] += part.text
        if calls:
            delta["tool_calls"] = [{"index": number} | entry for number, entry in calls.items()]
        logprobs = self._logprobs(answer, piece.handle, piece.begin, piece.end)
        return self._chunk(answer, index, delta, logprobs, piece.finish_reason)

    def frame(self, answer: Answer) -> dict[str, Any]:
        """A chunk without choices."""
        return answer.frame("chat.completion.chunk", "chatcmpl", [])

    def _chunk(
        self, answer: Answer, index: int, delta: Any, logprobs: Any, reason: str | None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return answer.frame("chat.completion.chunk", "chatcmpl", [choice])

    def _logprobs(self, answer: Answer, handle: Handle, begin: int, end: int) -> Any:
        if not answer.asked.logprobs:
            return None
        content = [
            entry.as_object | {"top_logprobs": [other.as_object for other in entry.top]}
            for entry in _entries(answer, handle, begin, end)
        ]
        return {"content": content, "refusal": None}


def _called(call: Call) -> dict[str, Any]:
    """A tool call as an object of chat completions."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A token with its log-probability; None for a prompt's first token.

    spelled: the token's bytes. top: the likeliest tokens at its position, as many as requested.
    """

    spelled: bytes
    logprob: float | None
    top: tuple[_Entry, ...] = ()
    token: int = -1

    @property
    def name(self) -> str:
        """The text of the token, or its bytes."""
        return token_name(self.spelled)

    @property
    def by_name(self) -> dict[str, float] | None:
        """The log-probabilities of the token and of the likeliest tokens, by name."""
        if self.logprob is None:
            return None
        found = {self.name: self.logprob}
        for other in self.top:
            if other.token != self.token:
                # Two tokens can have the same text; their ids tell them apart.
                name = other.name if other.name not in found else f"token_id:{other.token}"
                found[name] = other.logprob or 0.0
        return found

    @property
    def as_object(self) -> dict[str, Any]:
        """The token as an object of chat completions."""
        return {"token": self.name, "logprob": self.logprob, "bytes": list(self.spelled)}


def _entry(
    answer: Answer, token: int, logprob: float, candidates: Sequence[tuple[int, float]]
) -> _Entry:
    """The entry of a token, with as many of the likeliest tokens as requested.

    candidates: token ids and log-probabilities, likeliest first; empty if the token itself is the
    likeliest and the only one requested.
    """
    likeliest = list(candidates or [(token, logprob)])[: answer.asked.top]
    top = (_Entry(answer.bytes_of(one), chance, (), one) for one, chance in likeliest)
    return _Entry(answer.bytes_of(token), logprob, tuple(top), token)


def _entries(answer: Answer, handle: Handle, begin: int, end: int) -> list[_Entry]:
    """The entries of a request's new tokens `begin` to `end`."""
    pairs = zip(handle.tokens[begin:end], handle.logprobs[begin:end], strict=True)
    candidates = handle.top_logprobs[begin:end] or [[]] * (end - begin)
    return [_entry(answer, *pair, top) for pair, top in zip(pairs, candidates, strict=True)]


def _prompt_entries(answer: Answer, handle: Handle) -> list[_Entry]:
    """The entries of a prompt's tokens."""
    scores = handle.prompt_logprobs
    assert scores is not None
    first, *others = handle.prompt
    entries = [_Entry(answer.bytes_of(first), None)]
    columns = scores.logprobs, scores.top, scores.top_logprobs
    for token, logprob, top, chances in zip(others, *(x.tolist() for x in columns), strict=True):
        entries.append(_entry(answer, token, logprob, list(zip(top, chances, strict=True))))
    return entries


def _in_columns(
    entries: Sequence[_Entry], offsets: Sequence[int], with_top: bool
) -> dict[str, Any]:
    """The log-probabilities object of /v1/completions. offsets: text offsets of the tokens."""
    return {
        "tokens": [entry.name for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [entry.by_name for entry in entries] if with_top else None,
        "text_offset": list(offsets),
    }
