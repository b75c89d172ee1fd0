"""The server as a Starlette application: its routes, limits and streams."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from mpjax.engine.engine import Engine
from mpjax.engine.handle import Handle
from mpjax.json_text import json_text
from mpjax.language_model import LanguageModel
from mpjax.random_keys import following
from mpjax.serve.answers import Answer, Chats, Completions, Style, pieces
from mpjax.serve.errors import MODEL_NOT_FOUND, WRONG_API_KEY, RequestError
from mpjax.serve.logs import GONE, LOGGER, AccessLog, Record, record_of
from mpjax.serve.metrics import exposition
from mpjax.serve.requests import Asked, read_chat, read_completion, refusal_of_engine

Read = Callable[[LanguageModel, Any, bool], Asked]


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits beyond which the server refuses requests.

    waiting: requests that wait for the engine, beyond which others are refused (503).
    body_bytes: of a body (413). api_key: without which requests are refused (401), or None.
    ignore_unknown: whether keys that the server does not know are ignored, and not refused (400).

    Raises ValueError for an empty key, which a request without one would have.
    """

    waiting: int = 1000
    body_bytes: int = 8 << 20
    api_key: str | None = None
    ignore_unknown: bool = False

    def __post_init__(self) -> None:
        if self.api_key == "":
            raise ValueError("api_key is empty: give a key, or None for a server without one")


def application(
    engine: Engine, name: str, limits: Limits | None = None, *, origins: Sequence[str] = ()
) -> Starlette:
    """The server of an engine under OpenAI's protocol.

    name: of the model, which requests have to name. origins: of pages whose scripts may read
    answers in a browser, such as https://example.org, or * for all (CORS). The engine runs in its
    thread between the server's start and end, and is closed at its end.
    """
    server = _Server(engine, name, limits or Limits())

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        engine.start()
        began = time.monotonic()
        try:
            yield
        finally:
            await asyncio.to_thread(engine.close)
            new = engine.statistics()["new_tokens"]
            seconds = time.monotonic() - began
            LOGGER.info(f"stopped after {seconds:.0f} seconds and {new:,} new tokens")

    completions = server.endpoint(read_completion, Completions())
    chats = server.endpoint(read_chat, Chats())
    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chats, methods=["POST"]),
            Route("/v1/models", server.models),
            Route("/v1/models/", server.models),
            Route("/v1/models/{name:path}", server.model),
            Route("/health", server.health),
            Route("/metrics", server.metrics),
        ],
        middleware=[
            Middleware(AccessLog),
            *([Middleware(CORSMiddleware, **_allowed(origins))] if origins else []),
        ],
        exception_handlers={RequestError: _refuse, HTTPException: _refuse_route},
        lifespan=lifespan,
    )


def _allowed(origins: Sequence[str]) -> dict[str, Any]:
    """The arguments of CORSMiddleware: the requests that scripts of other pages may send."""
    headers = ["Authorization", "Content-Type"]
    return {"allow_origins": origins, "allow_methods": ["GET", "POST"], "allow_headers": headers}


class _Server:
    def __init__(self, engine: Engine, name: str, limits: Limits) -> None:
        self.engine, self.name, self.limits = engine, name, limits
        self.began = int(time.time())

    def endpoint(self, read: Read, style: Style) -> Callable[[Request], Any]:
        """The handler of one of the two kinds of completions."""

        async def handle(request: Request) -> Response:
            self._authorise(request)
            try:
                return await self._complete(request, read, style)
            except ClientDisconnect:
                record_of(request.scope).error = GONE
                return Response(status_code=499)  # which nobody receives

        return handle

    async def _complete(self, request: Request, read: Read, style: Style) -> Response:
        """The answer to a body. Raises RequestError for a wrong one, and ClientDisconnect."""
        body = await self._body(request)
        # In a thread: other requests go on while a long text is tokenised.
        asked = await asyncio.to_thread(read, self.engine.lm, body, self.limits.ignore_unknown)
        if asked.model is not None:
            self._require_model(asked.model)
        record = record_of(request.scope)
        record.handles = handles = self._submit(asked)
        record.answer = answer = Answer(self.engine.lm.require_tokenizer(), self.name, asked)
        if asked.stream:
            return _Events(_stream(style, answer, record), record)
        await _wait(request, handles)
        return JSONResponse(style.whole(answer, handles))

    async def models(self, request: Request) -> Response:
        """The list of the one model."""
        self._authorise(request)
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The one model."""
        self._authorise(request)
        self._require_model(request.path_params["name"].rstrip("/"))
        return JSONResponse(self._model())

    async def health(self, _: Request) -> Response:
        """Whether requests can be served."""
        if self.engine.is_closed:
            return JSONResponse({"status": "the engine has stopped"}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """Numbers of the engine, for Prometheus."""
        self._authorise(request)
        text = exposition(self.engine.statistics())
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    def _model(self) -> dict[str, Any]:
        facts = {"id": self.name, "object": "model", "created": self.began, "owned_by": "mpjax"}
        return facts | {"max_model_len": self.engine.max_tokens}

    def _require_model(self, name: str) -> None:
        if name != self.name:
            raise RequestError(
                f"there is no model {json_text(name, 80)}: this server has "
                f"{json_text(self.name, 80)}",
                "model",
                404,
                MODEL_NOT_FOUND,
            )

    def _authorise(self, request: Request) -> None:
        if (key := self.limits.api_key) is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # Starlette reads the bytes of a header as Latin-1.
        is_same = hmac.compare_digest(given.strip().encode("latin-1"), key.encode())
        if scheme.lower() != "bearer" or not is_same:
            message = "the API key is missing or wrong: send the header Authorization: Bearer KEY"
            raise RequestError(message, status=401, code=WRONG_API_KEY)

    async def _body(self, request: Request) -> Any:
        """The JSON in a body, of which no more than the limit is read."""
        coding = request.headers.get("content-encoding", "identity")
        if coding.lower() != "identity":
            message = f"the body has the content-encoding {json_text(coding)}: send it uncompressed"
            raise RequestError(message, status=415)
        most, read = self.limits.body_bytes, bytearray()
        async for part in request.stream():
            read += part
            if len(read) > most:
                raise RequestError(f"the body is longer than {most} bytes", status=413)
        try:
            return json.loads(read)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the body is not JSON: {error}") from error

    def _submit(self, asked: Asked) -> list[Handle]:
        """Gives the engine a request for each choice of each prompt: all of them, or none."""
        count = len(asked.prompts) * asked.choices
        if count > self.limits.waiting:
            raise RequestError(
                f"prompt and n ask for {count} answers, and at most {self.limits.waiting} requests "
                "may wait: ask for fewer at a time"
            )
        waiting = self.engine.statistics()["waiting"]
        if waiting + count > self.limits.waiting:
            raise RequestError(
                f"{waiting} requests wait, and the limit is {self.limits.waiting}: try later",
                status=503,
            )
        handles: list[Handle] = []
        try:
            for number in range(count):
                ids = asked.prompts[number // asked.choices]
                most = self.engine.max_tokens - len(ids) + 1  # the last token is never read
                wanted = max(1, most if asked.max_new_tokens is None else asked.max_new_tokens)
                handles.append(
                    self.engine.submit(
                        ids,
                        max_new_tokens=wanted,
                        sampling=asked.sampling,
                        stop=asked.stop,
                        seed=following(asked.seed, number),
                        priority=asked.priority,
                        prompt_logprobs=asked.echoes is not None and asked.logprobs,
                        logprobs=asked.candidates,
                    )
                )
        except ValueError as error:
            for handle in handles:
                handle.cancel()
            status = 503 if self.engine.is_closed else 400
            raise refusal_of_engine(error, status, asked.key) from error
        return handles


class _Events(StreamingResponse):
    """Server-sent events; the requests end with them, also if no event was ever asked for."""

    def __init__(self, events: AsyncIterator[str], record: Record) -> None:
        headers = {"Cache-Control": "no-cache"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._record = record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if not all(handle.is_finished for handle in self._record.handles):
                self._record.error = GONE
            for handle in self._record.handles:
                handle.cancel()


async def _wait(request: Request, handles: Sequence[Handle]) -> None:
    """Waits for the end of all requests; cancels them if the client goes away."""

    async def read(handle: Handle) -> None:
        async for _ in handle:
            pass

    async def watch() -> None:
        # The body has been read: all that can come is the end of the connection.
        while (await request.receive())["type"] != "http.disconnect":
            pass
        raise ClientDisconnect

    readers: asyncio.Future[Any] = asyncio.gather(*map(read, handles))
    watcher: asyncio.Future[Any] = asyncio.ensure_future(watch())
    try:
        await asyncio.wait([readers, watcher], return_when=asyncio.FIRST_COMPLETED)
        if not readers.done():
            await watcher
        await readers
    except (ValueError, RuntimeError) as error:
        raise RequestError(str(error), status=500) from error
    finally:
        watcher.cancel()
        readers.cancel()
        for handle in handles:
            handle.cancel()
        await asyncio.gather(readers, watcher, return_exceptions=True)  # else asyncio logs them


async def _stream(style: Style, answer: Answer, record: Record) -> AsyncIterator[str]:
    """The chunks of all choices as server-sent events.

    With the usage in a last chunk, all others have null in its place.
    """
    queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    usage: dict[str, Any] = {"usage": None} if answer.asked.with_usage else {}

    async def read(index: int, handle: Handle) -> None:
        try:
            if (first := style.first(answer, index, handle)) is not None:
                queue.put_nowait(first | usage)
            async for piece in pieces(answer, handle):
                queue.put_nowait(style.chunk(answer, index, piece) | usage)
        except (ValueError, RuntimeError) as error:
            record.error = RequestError(str(error), status=500)
            queue.put_nowait(record.error.as_object)
        finally:
            queue.put_nowait(None)

    tasks = [asyncio.ensure_future(read(*pair)) for pair in enumerate(record.handles)]
    try:
        left = len(tasks)
        while left:
            if (chunk := await queue.get()) is None:
                left -= 1
            else:
                yield _event(chunk)
        if answer.asked.with_usage:
            yield _event(style.last(answer) | {"usage": answer.usage(record.handles)})
        yield "data: [DONE]\n\n"
    finally:
        for task in tasks:
            task.cancel()


def _event(data: Any) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    record_of(request.scope).error = error
    return JSONResponse(error.as_object, error.status)


async def _refuse_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    response = await _refuse(request, RequestError(message, status=error.status_code))
    response.headers.update(error.headers or {})
    return response
