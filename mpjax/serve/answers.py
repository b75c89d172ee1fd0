"""Writes the objects of OpenAI's completions and chat completions."""

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
    """The objects that answer a request: a whole one, or the chunks of a stream.

    tokenizer: of the model. model: its name. id, created: of the answer.
    """

    tokenizer: Tokenizer
    model: str
    asked: Asked
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def usage(self, handles: Sequence[Handle]) -> dict[str, Any]:
        """The numbers of tokens.

        The choices of a prompt have it in common. Those behind the first find in the cache what the
        first one wrote, so that only the first one's tokens were there before the request.
        """
        first = handles[:: self.asked.choices]
        prompt = sum(len(handle.prompt) for handle in first)
        is_generated = self.asked.max_new_tokens != 0
        new = sum(len(handle.tokens) for handle in handles if is_generated)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(h.shared_tokens for h in first)},
        }

    def frame(self, kind: str, prefix: str, choices: list[Any]) -> dict[str, Any]:
        """The object around choices."""
        head = {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created}
        return head | {"model": self.model, "choices": choices}

    def reader(self, handle: Handle, at: Container[int] | None = None) -> AnswerReader:
        """Divides the answer of a chat: reasoning, text, and calls of tools.

        at: where markers are tokens, if not as the handle tells.
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
        """The text of a choice's prompt, if it is to be part of the answer."""
        return self.asked.echoes[index // self.asked.choices] if self.asked.echoes else ""

    def places(self, handle: Handle, echo: str = "") -> Places:
        """The places of a choice's new tokens in its text. echo: the prompt in front of them."""
        return Places(self.tokenizer, handle.prompt, len(echo))

    def bytes_of(self, token: int) -> bytes:
        """The bytes of one token, special ones too."""
        return token_bytes(self.tokenizer, token)


class Style(Protocol):
    """How an endpoint writes one answer.

    end: the last line of a stream.
    """

    end: str

    def whole(self, answer: Answer, handles: Sequence[Handle]) -> dict[str, Any]:
        """The answer, when all requests have ended."""

    def reader(self, answer: Answer, handle: Handle) -> AnswerReader | None:
        """Divides a choice, if its parts are told apart."""

    def events(self, answer: Answer, index: int, handle: Handle) -> AsyncIterator[dict[str, Any]]:
        """The objects of a stream for a choice, as it comes."""

    def failure(self, answer: Answer, error: RequestError) -> dict[str, Any]:
        """The object of a stream that has failed."""

    def closing(self, answer: Answer, handles: Sequence[Handle]) -> list[dict[str, Any]]:
        """The objects of a stream behind those of all choices."""


class _Chunked(abc.ABC):
    """Streams of chunks, each with the next text of a choice."""

    end = "data: [DONE]\n\n"

    @abc.abstractmethod
    def reader(self, answer: Answer, handle: Handle) -> AnswerReader | None:
        """Divides a choice, if its parts are told apart."""

    @abc.abstractmethod
    def first(self, answer: Answer, index: int, handle: Handle) -> dict[str, Any] | None:
        """A chunk before the first text of a choice, if there is one."""

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
        """The error in place of a chunk."""
        return error.as_object

    def closing(self, answer: Answer, handles: Sequence[Handle]) -> list[dict[str, Any]]:
        """The usage, if it is asked for."""
        usage = {"usage": answer.usage(handles)}
        return [self.frame(answer) | usage] if answer.asked.with_usage else []


@dataclasses.dataclass(frozen=True)
class Piece:
    """New text of a request, with the tokens since the piece before.

    finish_reason: in the last piece. offsets: the places of the tokens in the text, if
    log-probabilities are asked for. parts: of the text, if they are told apart, which may lag
    behind it.
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
    """The text of a request in pieces, each with its tokens; the last has the reason of the end.

    reader: divides the text, if its parts are told apart.
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
                continue  # it ends soon
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
    """Why an answer has ended: by calls of tools, or for the reason of its request."""
    reason = handle.finish_reason
    return "tool_calls" if has_calls(parts, is_cut=reason == "length") else reason


class Completions(_Chunked):
    """The answers of /v1/completions."""

    def whole(self, answer: Answer, handles: Sequence[Handle]) -> dict[str, Any]:
        """The answer, when all requests have ended."""
        choices = [self._choice(answer, index, handle) for index, handle in enumerate(handles)]
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
        """None: the text is what the model wrote."""
        return None

    def first(self, answer: Answer, index: int, handle: Handle) -> dict[str, Any] | None:
        """The prompt, if it is to be echoed."""
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
        """Divides a choice."""
        return answer.reader(handle)

    def first(self, answer: Answer, index: int, handle: Handle) -> dict[str, Any] | None:
        """The role."""
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
    """A call of a tool as chat completions have it."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A token with its log-probability; None for a prompt's first.

    spelled: its bytes. top: the likeliest tokens in its place, as many as were asked for.
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
        """The log-probabilities of the token and of the likeliest ones, by their names."""
        if self.logprob is None:
            return None
        found = {self.name: self.logprob}
        for other in self.top:
            if other.token != self.token:
                # Vocabularies may spell two tokens alike; each has a number of its own.
                name = other.name if other.name not in found else f"token_id:{other.token}"
                found[name] = other.logprob or 0.0
        return found

    @property
    def as_object(self) -> dict[str, Any]:
        """The token as chat completions have it."""
        return {"token": self.name, "logprob": self.logprob, "bytes": list(self.spelled)}


def _entry(
    answer: Answer, token: int, logprob: float, candidates: Sequence[tuple[int, float]]
) -> _Entry:
    """The entry of a token, with as many candidates as were asked for.

    candidates: tokens and log-probabilities, likeliest first; none where the token is the first.
    """
    likeliest = list(candidates or [(token, logprob)])[: answer.asked.top]
    top = (_Entry(answer.bytes_of(one), chance, (), one) for one, chance in likeliest)
    return _Entry(answer.bytes_of(token), logprob, tuple(top), token)


def _entries(answer: Answer, handle: Handle, begin: int, end: int) -> list[_Entry]:
    """Entries of new tokens."""
    pairs = zip(handle.tokens[begin:end], handle.logprobs[begin:end], strict=True)
    candidates = handle.top_logprobs[begin:end] or [[]] * (end - begin)
    return [_entry(answer, *pair, top) for pair, top in zip(pairs, candidates, strict=True)]


def _prompt_entries(answer: Answer, handle: Handle) -> list[_Entry]:
    """Entries of a prompt's tokens."""
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
    """Log-probabilities as /v1/completions has them. offsets: places of the tokens in the text."""
    return {
        "tokens": [entry.name for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [entry.by_name for entry in entries] if with_top else None,
        "text_offset": list(offsets),
    }
