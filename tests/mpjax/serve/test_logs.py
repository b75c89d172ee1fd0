from __future__ import annotations

import asyncio
import json
import logging
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette")

from mpjax.serve.errors import RequestError
from mpjax.serve.logs import AccessLog, Lines, record_of

pytestmark = pytest.mark.any_version

USAGE = {"prompt_tokens": 7, "completion_tokens": 12, "total_tokens": 19}


@pytest.fixture
def lines(caplog):
    """The lines of the log, as text and as objects."""
    caplog.set_level(logging.INFO, "mpjax.serve")

    def read():
        plain = [Lines().format(record) for record in caplog.records]
        return plain, [json.loads(Lines(as_json=True).format(one)) for one in caplog.records]

    return read


def answer(app, path="/v1/completions", raw=None):
    """The messages that an application sends for a request, within the log."""
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "raw_path": raw or path.encode()}
    asyncio.run(AccessLog(app)(scope, None, send))
    return sent


async def begin(send, status=200):
    await send({"type": "http.response.start", "status": status, "headers": []})


def test_a_line_has_status_tokens_and_seconds(lines):
    async def app(scope, receive, send):
        record = record_of(scope)
        record.answer = SimpleNamespace(usage=lambda handles: USAGE)
        record.handles = [
            SimpleNamespace(first_token_time=time)
            for time in (record.began + 2, record.began + 0.5, None)
        ]
        await begin(send)

    [message] = answer(app)
    [line], [found] = lines()
    headers = dict(message["headers"])
    assert headers[b"x-request-id"].decode() == found["id"]
    assert (found["method"], found["path"], found["status"]) == ("POST", "/v1/completions", 200)
    assert (found["prompt_tokens"], found["completion_tokens"]) == (7, 12)
    assert found["first_token_seconds"] == 0.5
    assert 0 <= found["seconds"] < 60
    assert found["level"] == "info"
    assert "error" not in found
    assert " info POST /v1/completions 200 prompt_tokens=7 completion_tokens=12 seconds=" in line


@pytest.mark.parametrize(("status", "level"), [(400, "warning"), (503, "error")])
def test_an_error_is_logged_with_its_request(lines, status, level):
    async def app(scope, receive, send):
        record_of(scope).error = RequestError('n is "\n"', "n", status)
        await begin(send, status)

    answer(app)
    [line], [found] = lines()
    assert (found["level"], found["status"], found["error"]) == (level, status, 'n is "\n"')
    assert "prompt_tokens" not in found
    assert line.endswith(r'error="n is \"\n\""')


def test_a_fault_is_an_answer_and_a_line_with_its_traceback(lines):
    async def app(scope, receive, send):
        raise KeyError("/secret/path")

    start, body = answer(app)
    assert start["status"] == 500
    error = json.loads(body["body"])["error"]
    [line], [found] = lines()
    assert (error["type"], error["code"]) == ("server_error", None)
    assert found["id"] in error["message"]
    assert "secret" not in error["message"]
    assert (found["status"], found["level"]) == (500, "error")
    assert "KeyError: '/secret/path'" in found["traceback"]
    assert "KeyError: '/secret/path'" in line


def test_a_fault_amid_an_answer_ends_it(lines):
    async def app(scope, receive, send):
        await begin(send)
        raise KeyError("x")

    with pytest.raises(KeyError):
        answer(app)
    [_], [found] = lines()
    assert (found["status"], found["level"]) == (200, "error")
