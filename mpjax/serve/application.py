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
from mpjax.engine.options import TooLongError
from mpjax.errors import ProcessLostError
from mpjax.files.json_text import json_text
from mpjax.language_model import LanguageModel
from mpjax.sampling.random_keys import following
from mpjax.serve.adapters import ServedAdapters
from mpjax.serve.answers import Answer, Chats, Completions, Style, pieces
from mpjax.serve.embeddings import EMBEDDINGS
from mpjax.serve.errors import NOT_OFFERED, WRONG_API_KEY, RequestError
from mpjax.serve.logs import GONE, LOGGER, AccessLog, Record, record_of
from mpjax.serve.metrics import exposition
from mpjax.serve.requests import Asked, read_chat, read_completion, refusal_of_engine
from mpjax.serve.responses import Responses, read_response
from mpjax.serve.tokens import detokenize, tokenize

Read = Callable[[LanguageModel, Any, bool], Asked]
Endpoint = Callable[[Request], Any]


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits beyond which the server refuses requests.

    waiting: the number of requests that may wait for the engine (503 above it).
    body_bytes: the size of a body (413 above it). api_key: the key that requests must have (else
        401), or None.
    ignore_unknown: whether unknown keys are ignored rather than refused (400).
    adapters: the number of adapters that clients may load from folders of this machine at a time;
        0: clients can't load adapters (403).

    Raises ValueError for an empty api_key, which a request without a key would match.
    """

    waiting: int = 1000
    body_bytes: int = 8 << 20
    api_key: str | None = None
    ignore_unknown: bool = False
    adapters: int = 0

    def __post_init__(self) -> None:
        if self.api_key == "":
            raise ValueError("api_key is empty: give a key, or None for a server without one")


def application(
    engine: Engine, name: str, limits: Limits | None = None, *, origins: Sequence[str] = ()
) -> Starlette:
    """The server of an engine with OpenAI's protocol.

    name: the model's name in requests, beside the names of its adapters. origins: the web pages
    whose scripts may read answers in a browser (CORS), such as https://example.org, or * for all.
    The engine's thread starts and ends with the server, which also closes the engine.
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

    endpoints = {
        "/v1/completions": server.endpoint(read_completion, Completions),
        "/v1/chat/completions": server.endpoint(read_chat, Chats),
        "/v1/responses": server.endpoint(read_response, Responses),
        "/tokenize": server.question(tokenize),
        "/detokenize": server.question(detokenize),
        **{path: server.question(answer, of_base=True) for path, answer in EMBEDDINGS.items()},
    }
    return Starlette(
        routes=[
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()),
            Route("/v1/load_lora_adapter", server.change(server.adapters.load), methods=["POST"]),
            Route(
                "/v1/unload_lora_adapter", server.change(server.adapters.unload), methods=["POST"]
            ),
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
    """The arguments of CORSMiddleware for these origins."""
    headers = ["Authorization", "Content-Type"]
    return {"allow_origins": origins, "allow_methods": ["GET", "POST"], "allow_headers": headers}


class _Server:
    def __init__(self, engine: Engine, name: str, limits: Limits) -> None:
        self.engine, self.name, self.limits = engine, name, limits
        self.began = int(time.time())
        self._computing, self._turn = 0, asyncio.Lock()  # of answers computed beside the engine
        self._door = asyncio.Lock()  # held while requests are counted and added
        self.adapters = ServedAdapters(engine.lm, name, limits.adapters)

    def change(self, make: Callable[[LanguageModel, Any, bool], str]) -> Endpoint:
        """The handler of requests that load or unload an adapter."""

        async def handle(request: Request) -> Response:
            self._authorise(request)
            # Browsers send other content types across origins without a CORS preflight.
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                message = "expected the header Content-Type: application/json"
                raise RequestError(message, status=415)
            body = await self._body(request)
            ignore = self.limits.ignore_unknown
            return PlainTextResponse(await asyncio.to_thread(make, self.engine.lm, body, ignore))

        return handle

    def question(
        self, answer: Callable[[LanguageModel, Any, bool], dict[str, Any]], *, of_base: bool = False
    ) -> Endpoint:
        """The handler of requests that are answered without the engine.

        of_base: whether the answer depends on the weights, so that adapters are refused.
        """

        async def handle(request: Request) -> Response:
            self._authorise(request)
            body = await self._body(request)
            name = body.get("model") if isinstance(body, dict) else None
            adapter = self.adapters.find(name) if isinstance(name, str) else None
            if adapter is not None and of_base:
                message = f"there are no embeddings and scores of adapters: name {self.name}"
                raise RequestError(message, "model")
            arguments = self.engine.lm, body, self.limits.ignore_unknown
            if of_base:
                if (count := self.engine.lm.processes) > 1:
                    message = f"embeddings and scores are not computed over {count} processes"
                    raise RequestError(f"{message}: ask a server of one", code=NOT_OFFERED)
                return JSONResponse(await self._compute(answer, *arguments))
            found = await asyncio.to_thread(answer, *arguments)
            known = {"max_model_len": self.engine.max_tokens}
            return JSONResponse(found | (known if "count" in found else {}))

        return handle

    async def _compute(self, answer: Callable[..., Any], *arguments: Any) -> Any:
        """Computes an answer in a thread beside the engine, one at a time."""
        if self._computing >= self.limits.waiting:
            message = f"{self._computing} requests wait, and as many may: try later"
            raise RequestError(message, status=503)
        self._computing += 1
        try:
            async with self._turn:
                return await asyncio.to_thread(answer, *arguments)
        except RequestError:
            raise
        except Exception as error:
            raise _failure(error) from error
        finally:
            self._computing -= 1

    def endpoint(self, read: Read, style: Callable[[], Style]) -> Endpoint:
        """The handler of one kind of completions."""

        async def handle(request: Request) -> Response:
            self._authorise(request)
            try:
                return await self._complete(request, read, style())
            except ClientDisconnect:
                record_of(request.scope).error = GONE
                return Response(status_code=499)  # the client is gone

        return handle

    async def _complete(self, request: Request, read: Read, style: Style) -> Response:
        """The answer to a request. Raises RequestError for a wrong body, and ClientDisconnect."""
        body = await self._body(request)
        # In a thread: other requests go on while a long text is tokenised.
        asked = await asyncio.to_thread(read, self.engine.lm, body, self.limits.ignore_unknown)
        adapter = self.adapters.find(asked.model)
        record = record_of(request.scope)
        async with self._door:  # in a thread: submitting may wait for an adapter that is loading
            handles = await asyncio.to_thread(self._submit, asked, adapter)
        record.handles = handles
        tokenizer, name = self.engine.lm.require_tokenizer(), adapter or self.name
        record.answer = answer = Answer(tokenizer, name, asked)
        if asked.stream:
            return _Events(_stream(style, answer, record), record)
        await _wait(request, style, answer, handles)
        return JSONResponse(style.whole(answer, handles))

    async def models(self, request: Request) -> Response:
        """The list of the model and its adapters."""
        self._authorise(request)
        names = [None, *self.engine.lm.adapters.names]
        return JSONResponse({"object": "list", "data": list(map(self._model, names))})

    async def model(self, request: Request) -> Response:
        """The model, or one of its adapters."""
        self._authorise(request)
        name = self.adapters.find(request.path_params["name"].rstrip("/"))
        return JSONResponse(self._model(name))

    async def health(self, _: Request) -> Response:
        """The health check: whether requests can be served."""
        if self.engine.is_closed:
            return JSONResponse({"status": "the engine has stopped"}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """The engine's metrics for Prometheus."""
        self._authorise(request)
        text = exposition(self.engine.statistics())
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    def _model(self, adapter: str | None) -> dict[str, Any]:
        """The model object of an adapter, or of the model itself for None."""
        facts = {"id": adapter or self.name, "object": "model", "created": self.began}
        facts |= {"owned_by": "mpjax", "max_model_len": self.engine.max_tokens}
        return facts if adapter is None else facts | {"parent": self.name}

    def _authorise(self, request: Request) -> None:
        if (key := self.limits.api_key) is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # Starlette decodes headers as Latin-1.
        is_same = hmac.compare_digest(given.strip().encode("latin-1"), key.encode())
        if scheme.lower() != "bearer" or not is_same:
            message = "the API key is missing or wrong: send the header Authorization: Bearer KEY"
            raise RequestError(message, status=401, code=WRONG_API_KEY)

    async def _body(self, request: Request) -> Any:
        """The JSON value of a body, which is read up to the limit of bytes."""
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

    def _submit(self, asked: Asked, adapter: str | None) -> list[Handle]:
        """Submits a request for each choice of each prompt: all, or none if one is refused."""
        count = len(asked.prompts) * asked.requests
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
                ids = asked.prompts[number // asked.requests]
                most = self.engine.max_tokens - len(ids) + 1  # the last token is never fed back
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
                        adapter=adapter,
                        constraint=asked.constraint,
                    )
                )
        except ValueError as error:
            for handle in handles:
                handle.cancel()
            status = 503 if self.engine.is_closed else 400
            if isinstance(error, TooLongError):  # clients look for these words
                words = f"the maximum context length is {self.engine.max_tokens} tokens"
                error = TooLongError(f"{error} ({words})")
            raise refusal_of_engine(error, status, asked.key, asked.constraint_key) from error
        return handles


class _Events(StreamingResponse):
    """Server-sent events. Requests are cancelled when the stream ends, even if it never began."""

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


async def _wait(request: Request, style: Style, answer: Answer, handles: Sequence[Handle]) -> None:
    """Waits for the end of all requests; cancels them if the client goes away."""

    async def read(handle: Handle) -> None:
        async for _ in pieces(style.reader(answer, handle), answer, handle):
            pass

    async def watch() -> None:
        # The body has been read: only a disconnect can follow.
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
    except ClientDisconnect:
        raise
    except Exception as error:
        raise _failure(error) from error
    finally:
        watcher.cancel()
        readers.cancel()
        for handle in handles:
            handle.cancel()
        await asyncio.gather(readers, watcher, return_exceptions=True)  # else asyncio logs them


async def _stream(style: Style, answer: Answer, record: Record) -> AsyncIterator[str]:
    """The streamed objects of all choices as server-sent events.

    If the last chunk has the usage, all earlier ones have `usage: null`.
    """
    queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    usage: dict[str, Any] = {"usage": None} if answer.asked.with_usage else {}

    async def read(index: int, handle: Handle) -> None:
        try:
            async for event in style.events(answer, index, handle):
                queue.put_nowait(event | usage)
        except (
            Exception
        ) as error:  # an exception that is missed here would end the stream as if it were complete
            record.error = _failure(error)
            queue.put_nowait(style.failure(answer, record.error))
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
        for event in style.closing(answer, record.handles):
            yield _event(event)
        yield style.end
    finally:
        for task in tasks:
            task.cancel()


def _failure(error: Exception) -> RequestError:
    """The error of an answer as a RequestError (500). Unexpected exceptions are logged."""
    if isinstance(error, ValueError | RuntimeError | ProcessLostError):
        return RequestError(str(error), status=500)
    LOGGER.error("an answer failed", exc_info=error)
    return RequestError(f"{type(error).__name__}: {error}", status=500)


def _event(data: Any) -> str:
    """An object as a server-sent event, named by the object's type if it has one."""
    head = f"event: {data['type']}\n" if "type" in data else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n"


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
