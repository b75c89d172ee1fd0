"""Writes the objects of OpenAI's completions and chat completions."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from mpjax.channels import Part, Splitter, joined
from mpjax.engine.handle import Handle
from mpjax.serve.places import Places, prompt_places
from mpjax.serve.requests import Asked
from mpjax.serve.spelling import token_bytes, token_name
from mpjax.tokenizer import Tokenizer

TAIL = 16  # tokens at the end of a prompt, in which a template may begin the answer's reasoning


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

    def splitter(self, handle: Handle) -> Splitter | None:
        """Divides a request's reasoning from its answer; None for models that mark none."""
        if (channels := self.tokenizer.channels) is None:
            return None
        return Splitter(channels, self.tokenizer.decode(handle.prompt[-TAIL:], skip_special=False))

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
    """How an endpoint writes its answers."""

    def whole(self, answer: Answer, handles: Sequence[Handle]) -> dict[str, Any]:
        """The answer, when all requests have ended."""

    def first(self, answer: Answer, index: int, handle: Handle) -> dict[str, Any] | None:
        """A chunk before the first text of a choice, if there is one."""

    def chunk(self, answer: Answer, index: int, piece: Piece) -> dict[str, Any]:
        """A chunk with the next text of a choice."""

    def last(self, answer: Answer) -> dict[str, Any]:
        """A chunk without choices, for the usage."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """New text of a request, with the tokens since the piece before.

    finish_reason: in the last piece. offsets: the places of the tokens in the text, if
    log-probabilities are asked for. parts: of the text, divided by channels, which may lag behind
    it.
    """

    handle: Handle
    text: str
    begin: int
    end: int
    finish_reason: str | None = None
    offsets: Sequence[int] = ()
    parts: Sequence[Part] = ()


async def pieces(answer: Answer, handle: Handle) -> AsyncIterator[Piece]:
    """The text of a request in pieces, each with its tokens; the last has the reason of the end."""
    begin = 0
    splitter = answer.splitter(handle)
    places = answer.places(handle) if answer.asked.logprobs else None

    def piece(text: str, reason: str | None, parts: Sequence[Part]) -> Piece:
        end = len(handle.tokens)
        offsets = [] if places is None else places.of(handle.tokens[begin:end])
        return Piece(handle, text, begin, end, reason, offsets, parts)

    async for text in handle:
        new = piece(text, None, [Part(False, text)] if splitter is None else splitter.push(text))
        begin = new.end
        yield new
    yield piece("", handle.finish_reason, [] if splitter is None else splitter.finish())


class Completions:
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

    def last(self, answer: Answer) -> dict[str, Any]:
        """A chunk without choices."""
        return answer.frame("text_completion", "cmpl", [])

    def _chunk(
        self, answer: Answer, index: int, text: str, logprobs: Any, reason: str | None
    ) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return answer.frame("text_completion", "cmpl", [choice])


class Chats:
    """The answers of /v1/chat/completions."""

    def whole(self, answer: Answer, handles: Sequence[Handle]) -> dict[str, Any]:
        """The answer, when all requests have ended."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "refusal": None} | self._message(answer, handle),
                "logprobs": self._logprobs(answer, handle, 0, len(handle.tokens)),
                "finish_reason": handle.finish_reason,
            }
            for index, handle in enumerate(handles)
        ]
        return answer.frame("chat.completion", "chatcmpl", choices) | {
            "usage": answer.usage(handles)
        }

    def _message(self, answer: Answer, handle: Handle) -> dict[str, Any]:
        """The text for the user, and the reasoning of models that mark it."""
        if (splitter := answer.splitter(handle)) is None:
            return {"content": handle.text}
        reasoning, text = joined([*splitter.push(handle.text), *splitter.finish()])
        return {"content": text, "reasoning_content": reasoning or None}

    def first(self, answer: Answer, index: int, handle: Handle) -> dict[str, Any] | None:
        """The role."""
        return self._chunk(answer, index, {"role": "assistant", "content": ""}, None, None)

    def chunk(self, answer: Answer, index: int, piece: Piece) -> dict[str, Any]:
        """A chunk with the next text of a choice."""
        delta: dict[str, str] = {}
        for is_reasoning, text in piece.parts:
            key = "reasoning_content" if is_reasoning else "content"
            delta[key] = delta.get(key, "") + text
        logprobs = self._logprobs(answer, piece.handle, piece.begin, piece.end)
        return self._chunk(answer, index, delta, logprobs, piece.finish_reason)

    def last(self, answer: Answer) -> dict[str, Any]:
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
    candidates = handle.candidates[begin:end] or [[]] * (end - begin)
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
