"""The server's log: a line for each request, as text or as JSON."""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mpjax.engine.handle import Handle
from mpjax.serve.answers import Answer
from mpjax.serve.errors import RequestError

LOGGER = logging.getLogger("mpjax.serve")
GONE = RequestError("the client went away", status=499)


@dataclasses.dataclass
class Record:
    """The logged facts of a request, beside its method and path.

    id: the header `x-request-id` of the answer. began: by `time.perf_counter`. status: of HTTP,
        None before the answer begins. answer, handles: of a completion in the engine.
    error: why the request was refused or has failed, or None.
    """

    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    began: float = dataclasses.field(default_factory=time.perf_counter)
    status: int | None = None
    answer: Answer | None = None
    handles: Sequence[Handle] = ()
    error: RequestError | None = None

    @property
    def level(self) -> int:
        """The level of the request's line."""
        if self.error is None:
            return logging.INFO
        return logging.WARNING if self.error.status < 500 else logging.ERROR

    @property
    def fields(self) -> dict[str, Any]:
        """The numbers of tokens if any, the seconds, the id, and the error if any."""
        found: dict[str, Any] = {}
        if self.answer is not None:
            usage = self.answer.usage(self.handles)
            found = {key: usage[key] for key in ("prompt_tokens", "completion_tokens")}
        found["seconds"] = round(time.perf_counter() - self.began, 6)
        firsts = [h.first_token_time for h in self.handles if h.first_token_time is not None]
        if firsts:
            found["first_token_seconds"] = round(min(firsts) - self.began, 6)
        found["id"] = self.id
        return found if self.error is None else found | {"error": str(self.error)}


def record_of(scope: Scope) -> Record:
    """The record of a request, which AccessLog stores in the scope."""
    record: Record = scope["state"]["record"]
    return record


class AccessLog:
    """Middleware that logs a line for each request at the end of its answer.

    An unexpected exception is logged with its traceback, and answered by an error in OpenAI's form.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request with the wrapped application, and logs it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record = Record()
        scope["state"] = {**scope.get("state", {}), "record": record}

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.id
            await send(message)

        fault = None
        try:
            await self.app(scope, receive, send_with_id)
        except Exception as error:
            fault = error
            message = f"the server has failed: its log says why, at the id {record.id}"
            record.error = RequestError(message, status=500)
            if record.status is not None:
                raise  # the rest of the answer can't be sent: the connection ends
            await JSONResponse(record.error.as_object, 500)(scope, receive, send_with_id)
        finally:
            method, path = scope["method"], scope.get("raw_path", b"").decode("latin-1")
            facts = {"method": method, "path": path or scope["path"], "status": record.status}
            line = f"{method} {facts['path']} {record.status}"
            extra = {"facts": facts, "fields": record.fields}
            LOGGER.log(record.level, line, extra=extra, exc_info=fault)


class Lines(logging.Formatter):
    """Formats log records as lines of text, or of JSON if as_json."""

    def __init__(self, as_json: bool = False) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """The line; a text line is followed by the traceback, if there is one."""
        now = datetime.datetime.fromtimestamp(record.created).astimezone()
        head = {"time": now.isoformat(timespec="milliseconds"), "level": record.levelname.lower()}
        facts, fields = (getattr(record, name, {}) for name in ("facts", "fields"))
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        if self._as_json:
            found = head | ({"message": record.getMessage()} | facts | fields)
            return json.dumps(found | ({"traceback": trace} if trace else {}))
        parts = [*head.values(), record.getMessage()]
        parts += (f"{key}={json.dumps(value)}" for key, value in fields.items())
        return " ".join(parts) + (f"\n{trace}" if trace else "")
