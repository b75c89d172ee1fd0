"""A server of a tiny model that the tests of this folder share."""

from __future__ import annotations

import dataclasses

import pytest

import mpjax
from mpjax.kernels import KVFormat


@pytest.fixture(scope="session")
def lm(chat_folder):
    return dataclasses.replace(mpjax.load(chat_folder), kv_format=KVFormat(16), page_size=32)


@pytest.fixture(scope="session")
def engine(lm):
    return mpjax.Engine(lm, slots=4, chunk_tokens=64, steps=4)


@pytest.fixture(scope="session")
def server(engine):
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    from mpjax.serve.application import Limits, application
    from tests.mpjax.serve.running import PAGE, Server

    limits = Limits(waiting=40, body_bytes=20_000, api_key="secret")
    with Server(application(engine, "tiny", limits, origins=[PAGE])) as server:
        yield server


@pytest.fixture(scope="session")
def client(server):
    httpx = pytest.importorskip("httpx")
    headers = {"Authorization": "Bearer secret"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=120) as client:
        yield client


@pytest.fixture(scope="session")
def alone(lm):
    from tests.mpjax.serve.running import PROMPT

    return mpjax.generate(lm, PROMPT, max_new_tokens=12)
